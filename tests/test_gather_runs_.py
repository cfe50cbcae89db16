"""Records of several parties, stacked."""

import pytest
import torch

from dpkernels import reference

OPS = torch.ops.dpkernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("form", [(), (5,), (3, 0), (2, 3, 4)])
def test_equals_its_definition(form, dtype):
    sizes, counts = (4, 1, 9), torch.tensor([3, 0, 7])
    sources = [(10 * torch.randn(n, *form)).to(dtype) for n in sizes]
    chosen = [torch.randint(0, n, (int(count),)) for n, count in zip(sizes, counts, strict=True)]
    for source in (OPS, reference):
        out = torch.ones(3, 8, *form, dtype=dtype)
        source.gather_runs_(out, sources, torch.cat(chosen), counts)
        for t, indices, run in zip(sources, chosen, out, strict=True):
            assert torch.equal(run[: len(indices)], t[indices])
            assert not run[len(indices) :].any()


def test_refuses_what_does_not_fit():
    out, sources, counts = torch.zeros(2, 3, 4), [torch.ones(5, 4), torch.ones(6, 4)], torch.tensor([1, 2])
    for case in (
        (out, sources, torch.tensor([0, 0, 6]), counts),
        (out, sources, torch.tensor([0, -1, 0]), counts),
        (out, sources, torch.tensor([0, 1]), counts),
        (out, sources, torch.tensor([0, 1, 2, 3]), torch.tensor([4, 0])),
        (out, [sources[0], sources[1].double()], torch.tensor([0, 1, 2]), counts),
        (out, [sources[0], torch.ones(6, 5)], torch.tensor([0, 1, 2]), counts),
        (out, sources[:1], torch.tensor([0, 1, 2]), counts),
        (out, sources, torch.tensor([0, 1]), torch.tensor([3, -1])),
        (out, sources, torch.arange(6)[::2], counts),
        (out, sources, torch.tensor([0, 1, 2]), torch.tensor([1, 9, 2, 9])[::2]),
    ):
        with pytest.raises(RuntimeError, match=r"gather_runs_|counts"):
            OPS.gather_runs_(*case)
    assert not out.any()
