"""What ``lrmoe compare`` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lrmoe.studies.variants import Variant
from lrmoe.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """A comparison.

    Args:
        train: what all runs share; ``seed`` is replaced by each of ``seeds``, ``recalibration`` is what the variants
            change, ``memorize_bytes`` applies to the compared runs and not to the pretraining.
        variants: at least one with ``drop=0``, which the others are compared with; it runs through the same operator.
        seeds: distinct; each gives initial weights, data order and draws.
        pretrain_steps: if above 0, each seed first trains so many steps at ``drop=0`` on the whole text, and all
            variants go on from there.
        jobs: runs at a time; above 1 each is a process with ``train.threads`` or 1 thread.

    Raises:
        ValueError: naming what is wrong.
    """

    train: TrainConfig
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    pretrain_steps: int = 0
    jobs: int = 1
    baseline: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} must be one or more different integers")
        for name, least in (("pretrain_steps", 0), ("jobs", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer >= {least}")
        exact = [v.name for v in self.variants if v.config(self.train.recalibration).drop == 0]
        if not exact:
            raise ValueError('no variant has drop=0, to compare the others with; add "C0: drop=0"')
        object.__setattr__(self, "baseline", exact[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain values. ``jobs`` is left out: it changes when runs are done, not what they give."""
        return {
            "train": self.train.to_dict(),
            "variants": [v.to_dict() for v in self.variants],
            "seeds": list(self.seeds),
            "pretrain_steps": self.pretrain_steps,
        }
