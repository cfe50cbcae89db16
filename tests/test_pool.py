"""Memory that is kept from step to step, and torch's tensors in it."""

import os
import subprocess
import sys
import textwrap

import pytest

from dpkernels import ops, planner

pytestmark = pytest.mark.skipif(ops.native is None, reason="the pool is native code")


def served(script: str, **environment: str) -> str:
    """What a script prints in a process of its own whose large tensors are the pool's."""
    start = "import torch, dpkernels as dpk\nfrom dpkernels import ops, planner\nplanner.keep_memory()\n"
    command = [sys.executable, "-c", start + textwrap.dedent(script)]
    outer = {k: v for k, v in os.environ.items() if k not in planner.TUNING}
    found = subprocess.run(command, capture_output=True, text=True, env=outer | environment, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_block_goes_where_one_of_its_size_was_and_neighbours_become_one():
    served("""
    size = 1 << 16
    blocks = [torch.empty(size) for _ in range(6)]
    places = [t.data_ptr() for t in blocks]
    assert places == sorted(places) and all(place % 64 == 0 for place in places)
    blocks[1] = None
    assert torch.empty(size).data_ptr() == places[1]
    blocks[4] = blocks[3] = None
    assert torch.empty(2 * size).data_ptr() == places[3], "two free neighbours hold one of twice the size"
    assert torch.empty(size - 5000).data_ptr() == places[1], "the smallest that fits"
    big = torch.empty(4 * size)
    assert big.data_ptr() > places[-1]
    """)


def test_tensors_do_not_overlap_however_they_come_and_go():
    served("""
    import random
    random.seed(0)
    alive = {}
    for turn in range(4000):
        if alive and random.random() < 0.5:
            key = random.choice(list(alive))
            t = alive.pop(key)
            assert bool((t == key).all())
        else:
            n = random.choice([8192, 9000, 20000, 100_000, 8192 + turn])
            alive[turn] = torch.full((n,), turn, dtype=torch.int32)
    for key, t in alive.items():
        assert bool((t == key).all())
    alive.clear()
    del t
    kept = ops.native.pool_bytes()
    whole = torch.zeros(kept // 4 - 64, dtype=torch.int32)
    assert ops.native.pool_bytes() < 4096, "all that was free is one block"
    """)


def test_memory_is_given_back_and_comes_back_as_zeros():
    assert "given back" in served("""
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    t = torch.full((1 << 24,), 7.0)
    full = resident()
    del t
    assert ops.native.pool_bytes() >= 1 << 26
    assert resident() > full - (1 << 22), "kept"
    dpk.empty_pool()
    assert ops.native.pool_bytes() == 0
    assert resident() < full - (60 << 20)
    assert bool((torch.empty(1 << 24) == 0).all())
    print("given back")
    """)


def test_what_torch_took_before_and_takes_elsewhere_is_let_go_of():
    """oneDNN takes and gives back memory by address; small tensors and those from before are the C library's."""
    served("""
    conv = torch.nn.Conv2d(8, 16, 3)
    for size in (9, 33, 20, 64):
        conv(torch.randn(16, 8, size, size)).sum().backward()
    import threading
    box = [torch.randn(1 << 16) for _ in range(50)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    t = torch.randn(1 << 16)
    t.resize_(1 << 18)
    assert t.untyped_storage().nbytes() == 1 << 20
    t.share_memory_()
    x = torch.empty(0)
    y = torch.randn(1 << 16).numpy().copy()
    """)


def test_a_forked_process_has_memory_of_its_own():
    assert served("""
    import os
    torch.set_num_threads(1)  # those of the parent are not in the child
    t = torch.full((1 << 16,), 1.0)
    child = os.fork()
    if child == 0:
        t.fill_(2.0)
        other = torch.full((1 << 18,), 3.0)
        os._exit(0 if float(t.sum()) == 2 << 16 and float(other.sum()) == 3 << 18 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert float(t.sum()) == 1 << 16
    print("both")
    """).endswith("both\n")


@pytest.mark.parametrize("name", planner.TUNING[:3])
def test_whoever_tunes_memory_is_left_alone(name):
    value = "glibc.malloc.tcache_count=7" if name == "GLIBC_TUNABLES" else "131072"
    assert served("t = torch.empty(1 << 20)\ndel t\nprint(ops.native.pool_bytes())", **{name: value}) == "0\n"


def test_another_torch_than_that_of_the_build_is_left_alone():
    assert "others False False False False" in served("""
    print("others", *[ops.native.serve_torch(version) for version in ("2.13.1", "2.1", "2.13.00", "")])
    """)


def test_there_is_no_pool_where_addresses_are_limited():
    """A range as large as the machine's memory would take them all."""
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (48 << 30, 48 << 30))
    import dpkernels as dpk, torch
    from dpkernels import ops, planner
    def addresses():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = addresses()
    planner.free_bytes(torch.device("cpu"))
    x, y = torch.randn(64, 300), torch.zeros(64)
    rows = dpk.per_sample_gradients(torch.nn.Linear(300, 200), lambda o, y: o.sum(1), x, y)
    assert torch.isfinite(rows.clip_sum(1.0).sum["weight"]).all()
    assert torch.ops.dpkernels.unfilled(x, (3, 5)).shape == (3, 5)
    t = torch.empty(1 << 20)
    del t
    assert ops.native.pool_bytes() == 0
    assert addresses() - before < 1 << 31
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr.decode()


def test_memory_that_was_never_touched_is_not_free_twice():
    served("""
    device = torch.device("cpu")
    before = planner.free_bytes(device)
    t = torch.empty(1 << 33, dtype=torch.uint8)
    del t
    assert planner.free_bytes(device) < before + (1 << 29)
    """)


def test_a_step_needs_little_more_memory_than_is_in_use_at_once():
    """What is kept after steps of a convolution net: in the C library's heap, nearly twice what was in use."""
    found = served("""
    import itertools
    torch.manual_seed(0)
    widths = [8, 16, 16, 24, 24, 32]
    layers = [m for a, b in itertools.pairwise(widths) for m in (torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32 * 256, 10))
    x, y = torch.randn(32, 8, 16, 16), torch.randint(0, 10, (32,))
    loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    for _ in range(3):
        dpk.per_sample_gradients(model, loss_fn, x, y).clip_sum(1.0)
        print(ops.native.pool_bytes())
    """)
    _, second, third = (int(line) for line in found.split())
    assert second == third, "it does not grow"
    activations = sum(32 * 256 * width * 4 for width in (16, 16, 24, 24, 32)) * 2
    assert third < 3 * activations


def test_it_is_kept_by_the_first_check_of_a_model():
    served("""
    assert dpk.per_sample_gradients(torch.nn.Linear(4, 2), lambda o, y: o.sum(1), torch.randn(3, 4), torch.zeros(3))
    t = torch.empty(1 << 20)
    del t
    assert ops.native.pool_bytes() >= 1 << 22
    """)
