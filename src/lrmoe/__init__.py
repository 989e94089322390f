"""LRMoE: a schedulable backward pass for mixture-of-experts training."""

import importlib
from typing import Any

from lrmoe import balance
from lrmoe.config import LRMoEConfig
from lrmoe.control import Recalibrator, attach
from lrmoe.experts.meter import recording
from lrmoe.experts.operator import routed_experts
from lrmoe.layer import MoE
from lrmoe.routing import Routing, TopKRouter

__version__ = "0.1.0"
__all__ = [
    "LRMoEConfig",
    "MoE",
    "Recalibrator",
    "Routing",
    "TopKRouter",
    "attach",
    "balance",
    "parallel",
    "recording",
    "register",
    "routed_experts",
]


def __getattr__(name: str) -> Any:
    # Only those who train on several ranks need torch.distributed, which not every build of torch has.
    if name == "parallel":
        return importlib.import_module("lrmoe.parallel")
    raise AttributeError(f"module 'lrmoe' has no attribute {name!r}")


def register() -> None:
    """Makes ``experts_implementation="lrmoe"`` known to Transformers (which is imported by this call)."""
    import lrmoe.hosts.transformers  # noqa: F401
