"""Nothing leaves the library as private but through `Gaussian`: release number, ledger entry, noise on all of it."""

import ast
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpkernels as dpk
from dpkernels import algorithms
from dpkernels.algorithms import BVRLSGD, DIFF2, DPLSGD, DPSGD, SDMDSGD, PriSMA

ROOT = Path(dpk.__file__).parent.parent
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LOSS = nn.CrossEntropyLoss(reduction="none")


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def noise(secure):
    return dpk.Gaussian(2.0, secure=secure, ledger=dpk.accounting.Ledger())


def gradients():
    return dpk.per_sample_gradients(model(), LOSS, X, Y)


# A path takes `secure`, releases twice (from each client), and returns the ledgers and what was released.
def of_op(call):
    def run(secure):
        gaussian = noise(secure)
        return [gaussian.ledger], [call(gaussian), call(gaussian)]

    return run


def of_algorithm(make):
    def run(secure):
        net = model()
        before = [p.detach().clone() for p in net.parameters()]
        algorithm = make(net, secure=secure, micro_batch_size=4)
        found = []
        for _ in range(2):
            algorithm.step(X, Y)
            found.append([(a - b).detach() for a, b in zip(net.parameters(), before, strict=True)])
        return [algorithm.ledger], found

    return run


def of_clients(make):
    def run(secure):
        net = model()
        algorithm = make(net, LOSS, [(X, Y), (X[:4], Y[:4])], secure=secure, micro_batch_size=4)
        found, before = [], [p.detach().clone() for p in net.parameters()]
        for _ in range(2):
            algorithm.step()
            found.append([(a - b).detach() for a, b in zip(net.parameters(), before, strict=True)])
        return algorithm.ledgers, found

    return run


OPTIONS = {"max_norm": 1.0, "noise_multiplier": 2.0, "expected_batch_size": 6.0}
diff2 = partial(
    DIFF2,
    lr=0.1,
    restart_every=2,
    gradient_norm=1.0,
    difference_norm=1.0,
    gradient_noise=0.5,
    difference_noise=0.5,
)
PATHS = {
    "clip_sum": of_op(lambda n: [dpk.clip_sum(X, 1.0, noise=n).sum]),
    "clip_difference_sum": of_op(lambda n: [dpk.clip_difference_sum(X, 0.9 * X, 1.0, noise=n).sum]),
    "clip_momentum_sum": of_op(
        lambda n: [dpk.clip_momentum_sum(X, 0.9 * X, gradient_norm=1.0, difference_norm=0.1, momentum=0.1, noise=n).sum]
    ),
    "clamp_sum": of_op(lambda n: [dpk.clamp_sum(X, 0.1, noise=n).sum]),
    "add_gaussian_": of_op(lambda n: [dpk.add_gaussian_(torch.zeros(7), n, sensitivity=1.0)]),
    "sparsify": of_op(lambda n: [dpk.sparsify(X[0], 1.0, seed=1, noise=n, sensitivity=1.0).values]),
    "PerSample.clip_sum": of_op(lambda n: list(gradients().clip_sum(1.0, n).sum.values())),
    "PerSample.clamp_sum": of_op(lambda n: list(gradients().clamp_sum(0.1, n).sum.values())),
    "DPSGD": of_algorithm(
        lambda m, **o: DPSGD(m, LOSS, optimizer=torch.optim.SGD(m.parameters(), lr=1.0), **OPTIONS, **o)
    ),
    "DIFF2": of_clients(diff2),
    "DIFF2, BVRLSGD": of_clients(partial(diff2, routine=BVRLSGD(3, 2, 1.0, 1.0))),
    "PriSMA": of_clients(
        partial(
            PriSMA,
            lr=0.1,
            momentum=0.2,
            gradient_norm=1.0,
            server_norm=1.0,
            difference_norm=0.1,
            batch_size=3,
            noise=1.0,
            initial_noise=1.0,
        )
    ),
    "SDMDSGD": of_clients(
        partial(
            SDMDSGD,
            topology=algorithms.topologies.ring(2),
            lr=0.1,
            mixing=0.9,
            keep_probability=1.0,
            clamp=0.1,
            noise_std=1.0,
            batch_size=3,
            sampling_rate=0.5,
        )
    ),
    "DPLSGD": of_algorithm(lambda m, **o: DPLSGD(m, LOSS, local_steps=2, lr=0.1, **OPTIONS, **o)),
}


def test_every_public_path_is_walked_here():
    """Everything public that takes noise, and every algorithm."""
    takes_noise = {name for name in dpk.__all__ if inspect.isfunction(f := getattr(dpk, name)) and _takes_noise(f)}
    methods = inspect.getmembers(dpk.PerSample, inspect.isfunction)
    takes_noise |= {f"PerSample.{name}" for name, f in methods if _takes_noise(f)}
    trains = {name for name in algorithms.__all__ if hasattr(getattr(algorithms, name), "step")}
    assert takes_noise | trains == {name.split(",")[0] for name in PATHS}


def _takes_noise(function):
    return "noise" in inspect.signature(function).parameters


class Watch(TorchDispatchMode):
    """Sees every op of ours, and the streams of noise that go into it."""

    def __init__(self):
        super().__init__()
        self.streams = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dpkernels":
            names = [a.name for a in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            if given.get("stream") is not None:
                self.streams.append(tuple(given["stream"].tolist()))
            self.streams += [tuple(stream.tolist()) for stream in given.get("streams", ())]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_each_release_has_its_entry_and_its_own_noise_everywhere(name, secure):
    with Watch() as watch:
        ledgers, (first, second) = PATHS[name](secure)
    # the server's two releases of DIFF2 with local steps are entered for both clients
    entries = sum(len(ledger) for ledger in ledgers) - (2 if "BVRLSGD" in name else 0)
    assert len(watch.streams) == entries >= 2
    assert len(set(watch.streams)) == entries
    again = PATHS[name](secure)[1]
    for a, b, other in zip(first, second, again[0], strict=True):
        assert a.numel() > 0
        assert (a != b).all()  # another release, another noise on every coordinate
        assert (a != other).all()  # and another key


@pytest.mark.parametrize("name", PATHS)
def test_the_entry_is_there_before_anything_is_computed_with_noise(name, monkeypatch):
    """A ledger that refuses lets nothing through: no op of ours gets a stream, weights stay as they are."""

    def refuse(self, **_):
        raise RuntimeError("refused")

    monkeypatch.setattr(dpk.accounting.Ledger, "record", refuse)
    nets, original = [], model
    monkeypatch.setitem(globals(), "model", lambda: nets.append(original()) or nets[-1])
    with Watch() as watch, pytest.raises(RuntimeError, match="refused"):
        PATHS[name](False)
    assert watch.streams == []
    for net in nets:
        for p, q in zip(net.parameters(), original().parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.grad is None


def test_two_gaussians_and_two_algorithms_share_no_stream():
    with Watch() as watch:
        for _ in range(3):
            for path in PATHS.values():
                path(False)
    assert len(set(watch.streams)) == len(watch.streams) >= 6 * len(PATHS)


def test_no_other_source_of_randomness_is_in_the_code():
    """Only noise.py (keys), sampling.py (batches) and the kernels draw; others draw made-up or public things."""
    allowed = {"self_check.py", "places.py", "training.py", "problems.py", "federation.py", "noise.py", "sampling.py"}
    random = {"rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "multinomial"}
    for path in [*ROOT.glob("dpkernels/**/*.py"), *ROOT.glob("algorithms/*.py")]:
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in random, f"{path.name}:{node.lineno} draws {node.func.attr}"


def test_only_two_places_take_a_release():
    """`take_release`, which all ops use, and `add_gaussian_`; `follow` takes none that anybody here draws."""
    found = []
    for path in [*ROOT.glob("dpkernels/**/*.py"), *ROOT.glob("algorithms/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "release":
                found.append(path.name)
    assert sorted(found) == ["dense.py", "dense.py", "noise.py"]
