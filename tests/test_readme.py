"""What the README shows works when pasted."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_code_blocks_run_in_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert [p.shape for p in names["private"]] == [(64, 784), (64,)]
    *table, epsilon = capsys.readouterr().out.splitlines()
    assert "\n".join(table) in README.read_text()
    assert 0 < float(epsilon) < 10


def test_the_example_equals_the_lines_below_it_but_for_noise():
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[:2]
    names: dict = {}
    exec(first.replace("std=1.1", "std=0.0"), names)
    ours = names["private"]
    exec(second.replace("1.1 *", "0.0 *"), names)
    torch.testing.assert_close(ours, names["private"], rtol=1e-5, atol=1e-6)
