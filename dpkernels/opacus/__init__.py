"""The drop-in for Opacus: `from dpkernels.opacus import PrivacyEngine`, and the training loop stays as it is.

    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.1, max_grad_norm=1.0
    )
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    epsilon = privacy_engine.get_epsilon(delta=1e-5)

Nothing here needs Opacus, but for `FusedDPOptimizer`, which is for those who keep its hooks.
"""

from typing import Any

from dpkernels.opacus.engine import PrivacyEngine
from dpkernels.opacus.loader import BatchMemoryManager, PoissonBatches, PrivateLoader
from dpkernels.opacus.module import PrivateModule
from dpkernels.opacus.optimizer import PrivateOptimizer

__all__ = [
    "BatchMemoryManager",
    "FusedDPOptimizer",
    "PoissonBatches",
    "PrivacyEngine",
    "PrivateLoader",
    "PrivateModule",
    "PrivateOptimizer",
]


def __getattr__(name: str) -> Any:
    if name == "FusedDPOptimizer":
        from dpkernels.opacus.fused import FusedDPOptimizer

        return FusedDPOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
