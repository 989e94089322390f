"""A mixture-of-experts layer: :class:`MoE`."""

from lrmoe.layer.moe import MoE
from lrmoe.layer.parts import ExpertsEngine

__all__ = ["ExpertsEngine", "MoE"]
