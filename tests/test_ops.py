"""The ops as PyTorch sees them: schemas, fake kernels, gradients, compilation."""

import pytest
import torch

import dpkernels as dpk
from tests import cases

SUMS = {
    "clip_sum": (1, lambda: (cases.bounds(1.5), None)),
    "clip_sum automatic": (1, lambda: (cases.bounds(1.5), 0.01)),
    "clip_sum per layer": (1, lambda: (cases.bounds(0.7, 1.5), None)),
    "clip_difference_sum": (2, lambda: (cases.bounds(1.5), None)),
    "clip_momentum_sum": (2, lambda: (cases.bounds(1.5, 0.4, 0.3),)),
    "clamp_sum": (1, lambda: (cases.bounds(0.6),)),
}


def sample(name, dtype=torch.float64, requires_grad=True):
    lists, arguments = SUMS[name]
    made = [cases.vectors([(5, 3), (5, 2, 2)], dtype, seed=i) for i in range(lists)]
    return [[t.requires_grad_(requires_grad) for t in tensors] for tensors in made], arguments()


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("noisy", [False, True])
def test_opcheck_sums(name, noisy):
    lists, arguments = sample(name)
    stream = cases.noise() if noisy else (None, None)
    op = getattr(torch.ops.dpkernels, name.split()[0]).default
    torch.library.opcheck(op, (*lists, *arguments, *stream))


@pytest.mark.parametrize("name", SUMS)
def test_gradients(name):
    lists, arguments = sample(name)
    flat = [t for tensors in lists for t in tensors]
    op = getattr(torch.ops.dpkernels, name.split()[0])

    def call(*tensors):
        sums, norms = op(*(list(tensors[i : i + 2]) for i in range(0, len(tensors), 2)), *arguments, *cases.noise())
        return *sums, norms

    torch.autograd.gradcheck(call, flat)
    torch.autograd.gradgradcheck(call, flat)


def test_gradient_of_rows_that_are_zero_or_not_finite():
    x = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [3.0, 4.0]], requires_grad=True)
    result = dpk.clip_sum(x, 1.0)
    (result.sum.sum() + result.norms[[0, 2]].sum()).backward()
    assert x.grad[0].eq(1).all()
    assert x.grad[1].eq(0).all()
    assert x.grad.isfinite().all()


def test_gradient_reaches_a_shared_base():
    local = torch.randn(4, 3, dtype=torch.float64)
    base = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda b: dpk.clip_difference_sum(local, b, 1.0).sum, base)


def test_opcheck_the_others():
    stream = cases.noise()
    torch.library.opcheck(torch.ops.dpkernels.add_gaussian_.default, ([torch.zeros(3), torch.zeros(2, 2)], *stream))
    vector = torch.randn(200, dtype=torch.float64, requires_grad=True)
    for noise in ((None, None), stream):
        torch.library.opcheck(torch.ops.dpkernels.sparsify.default, (vector, 0.3, torch.tensor([5]), *noise))
    torch.autograd.gradcheck(lambda v: dpk.sparsify(v, 0.3, seed=5).values, vector)


def counting_backend():
    """A list of the graphs compiled so far, and the back end that fills it."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    return compiled, backend


def test_a_training_loop_compiles_once():
    """Release numbers, keys and stds change; the compiled step does not."""
    compiled, backend = counting_backend()

    @torch.compile(backend=backend, fullgraph=True)
    def step(vectors, noise):
        return dpk.clip_sum(vectors, 1.0, noise=noise).sum

    vectors = cases.vectors([(6, 5), (6, 3)])
    noise, eager = dpk.Gaussian(0.5, seed=3), dpk.Gaussian(0.5, seed=3)
    results = [step(vectors, noise) for _ in range(6)]
    assert len(compiled) == 1
    for result in results:
        torch.testing.assert_close(result, dpk.clip_sum(vectors, 1.0, noise=eager).sum)
    assert not torch.equal(results[0][0], results[1][0])


def test_ops_compile_once_over_streams_and_stds():
    compiled, backend = counting_backend()

    @torch.compile(backend=backend, fullgraph=True)
    def step(vectors, stream, std):
        return torch.ops.dpkernels.clip_sum(vectors, cases.bounds(1.0), None, stream, std)

    vectors = cases.vectors([(6, 5)])
    for i in range(5):
        stream, std = cases.noise(std=1.0 + i, seed=i)
        torch.testing.assert_close(
            step(vectors, stream, std), torch.ops.dpkernels.clip_sum(vectors, cases.bounds(1.0), None, stream, std)
        )
    assert len(compiled) == 1


def test_compiled_gradients_equal_eager_ones():
    def loss(x):
        return (dpk.clip_sum(x, 1.0).sum ** 2).sum()

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = cases.vectors([(6, 5)], torch.float64)[0].requires_grad_()
        function(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_a_ledger_does_not_recompile_and_counts():
    compiled, backend = counting_backend()

    @torch.compile(backend=backend, fullgraph=True)
    def step(vectors, noise):
        return dpk.clip_sum(vectors, 1.0, noise=noise).sum

    ledger = dpk.accounting.Ledger(sampling_rate=0.5)
    noise = dpk.Gaussian(2.0, seed=3, ledger=ledger)
    for _ in range(10):
        step(cases.vectors([(6, 5)]), noise)
    assert len(ledger) == 10
    assert len(compiled) <= 3  # the first entry of a multiplier, and its being reproducible, are new to the step


def test_forward_mode_is_refused_rather_than_wrong():
    x, tangent = torch.randn(3, 2), torch.ones(3, 2)
    with pytest.raises(NotImplementedError, match="clip_sum: has no forward-mode derivative"):
        torch.func.jvp(lambda v: dpk.clip_sum(v, 100.0).sum, (x,), (tangent,))


def test_function_transforms_are_refused_rather_than_wrong():
    """torch does not let custom ops with a registered backward under torch.func; it must not go unnoticed."""
    x = torch.randn(3, 2)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda v: (dpk.clip_sum(v, 1.0).sum ** 2).sum())(x)
