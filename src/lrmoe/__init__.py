"""LRMoE: a schedulable backward pass for mixture-of-experts training."""

from typing import TYPE_CHECKING

from lrmoe import lazy
from lrmoe.config import LRMoEConfig

if TYPE_CHECKING:
    from lrmoe import balance, parallel
    from lrmoe.control import Recalibrator
    from lrmoe.experts.meter import recording
    from lrmoe.experts.operator import routed_experts
    from lrmoe.hosts.attach import attach
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

# A configuration needs no torch, and only those who train on several ranks need torch.distributed, which not every
# build of torch has.
__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "MoE": "lrmoe.layer",
        "Recalibrator": "lrmoe.control",
        "Routing": "lrmoe.routing",
        "TopKRouter": "lrmoe.routing",
        "attach": "lrmoe.hosts.attach",
        "balance": "lrmoe.balance",
        "parallel": "lrmoe.parallel",
        "recording": "lrmoe.experts.meter",
        "routed_experts": "lrmoe.experts.operator",
    },
)


def register() -> None:
    """Makes ``experts_implementation="lrmoe"`` known to Transformers (which is imported by this call)."""
    import lrmoe.hosts.transformers  # noqa: F401
