"""What the README and the pages of docs show works when pasted."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_code_blocks_run_in_order(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page):
        exec(block, names)
    shown = capsys.readouterr().out
    if page.stem == "engine":
        assert shown.strip() in page.read_text()
    if page.stem == "ops":
        assert 0 < float(shown) < 10
    if page.stem in ("opacus", "algorithms", "ranks"):
        assert 0 < names["epsilon"] < 10


def test_every_way_of_use_has_a_page_with_an_example():
    for name in ("ops", "engine", "opacus", "algorithms", "ranks"):
        assert f"docs/{name}.md" in README.read_text()
        assert blocks(ROOT / "docs" / f"{name}.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_example_equals_the_lines_below_it_but_for_noise():
    first, second = blocks(README)[:2]
    names: dict = {}
    exec(first.replace("std=1.1", "std=0.0"), names)
    ours = names["private"]
    exec(second.replace("1.1 *", "0.0 *"), names)
    torch.testing.assert_close(ours, names["private"], rtol=1e-5, atol=1e-6)
