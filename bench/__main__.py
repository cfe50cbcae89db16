"""`python -m bench [KIND] [words]`: time the library against its peers.

KIND is ops, training, scaling, local, differences, decentralised or scale; all of them without one. Words behind `ops`
pick cases by name (pytest's -k), behind the others models. Besides:

    fashion DIRECTORY          trains by two algorithms on Fashion-MNIST; an hour
    papers DIRECTORY [which]   what the papers of the federated algorithms show, in small; minutes
    opacus_examples DIRECTORY  two loops of Opacus's examples, by Opacus and by the drop-in; minutes
    soundness [ROWS]           hunts for a row that exceeds its clip bound; minutes
    audit [words]              attacks what is released
    gpu                        a training step on a GPU; needs one
    gpu_kernels                what compilers say of the GPU kernels
    roofline                   what the GPU kernels should cost, on paper
"""

import sys
from pathlib import Path

import pytest

from dpkernels.bench import (
    audit,
    decentralised,
    differences,
    fashion,
    gpu,
    gpu_kernels,
    local,
    opacus_examples,
    papers,
    roofline,
    scale,
    scaling,
    soundness,
    training,
)

HERE = Path(__file__).parent


def ops(words: list[str]) -> int:
    chosen = ["-k", " or ".join(words)] if words else []
    options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parent), "-s", "--benchmark-disable-gc"]
    return pytest.main([*options, *chosen, str(HERE / "ops")])


if __name__ == "__main__":
    kind, *words = sys.argv[1:] or ["all"]
    if kind in ("fashion", "papers", "opacus_examples"):
        {"fashion": fashion, "papers": papers, "opacus_examples": opacus_examples}[kind].main(words)
        sys.exit()
    if kind in ("soundness", "audit", "gpu"):
        sys.exit({"soundness": soundness, "audit": audit, "gpu": gpu}[kind].main(words))
    if kind in ("gpu_kernels", "roofline"):
        {"gpu_kernels": gpu_kernels, "roofline": roofline}[kind].main()
        sys.exit()
    timed = ("all", "ops", "training", "scaling", "local", "differences", "decentralised", "scale")
    if kind not in timed:
        sys.exit(
            f"bench: got {kind!r}, must be one of {', '.join(timed)}, fashion, papers, "
            "opacus_examples, soundness, audit, gpu, gpu_kernels, roofline"
        )
    status = ops(words) if kind in ("all", "ops") else 0
    if kind in ("all", "training"):
        training.main(words)
    if kind in ("all", "scaling"):
        scaling.main()
    if kind in ("all", "local"):
        local.main(words)
    if kind in ("all", "differences"):
        differences.main(words)
    if kind in ("all", "decentralised"):
        decentralised.main()
    if kind in ("all", "scale"):
        scale.main()
    sys.exit(status)
