"""What a user says of a study: which, how large, with which seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lrmoe.config import require_count, require_number
from lrmoe.problems import Problems
from lrmoe.training.config import TrainConfig, described

# By name, as a sentence has them.
REGIMES = {"scratch": "from scratch", "near_zero": "near zero loss", "fine_tune": "at a fine-tuning's loss"}
NAMES = (
    "ablation",
    "router_gradient",
    "quota",
    "error_budget",
    "schedule",
    "remainder",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """What all runs of a study share.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    model: str = described("qwen3-moe-nano", "preset, as of lrmoe train, or folder of a checkpoint")
    text: str | None = described(None, "file or folder to train on; default: the Python standard library's source")
    fine_tune_text: str | None = described(
        None, "file or folder for the fine-tuning; default: the standard library's help topics, in English"
    )
    steps: int = described(600, "optimizer steps from scratch; the other regimes take half as many, after these")
    batch: int = described(8, "sequences a step")
    seq: int = described(128, "tokens per sequence")
    lr: float = described(2e-3, "peak learning rate from scratch; half of it for the fine-tuning")
    warmup: float = described(
        0.15, "share of the steps from scratch in which nothing is dropped yet; the study of schedules has its own"
    )
    memorize_bytes: int = described(2048, "bytes that the regime near zero loss repeats")
    seeds: tuple[int, ...] = field(default=(0, 1, 2))
    regimes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            if not 0 <= require_number("warmup", self.warmup) < 1:
                raise ValueError(f"warmup={self.warmup!r} must be in [0, 1), a share of the steps")
        with problems:
            if require_count("steps", self.steps, least=1) < 20:
                raise ValueError(f"steps={self.steps} must be at least 20: a study compares how runs end")
        with problems:
            require_count("memorize_bytes", self.memorize_bytes, least=1)
        with problems:
            for seed in self.seeds:
                if require_count("seeds", seed) >= 2**32:
                    raise ValueError(f"seeds={seed} must be below 2**32")
            if not self.seeds or len(set(self.seeds)) != len(self.seeds):
                raise ValueError(f"seeds={list(self.seeds)} must be one or more different integers")
        with problems:
            for name in self.regimes:
                if name not in REGIMES:
                    raise ValueError(f"regimes={name!r} is not known; choose of {', '.join(REGIMES)}")
            if len(set(self.regimes)) != len(self.regimes):
                raise ValueError(f"regimes={list(self.regimes)} must be different; each is trained once")
        for name in ("model", "text", "fine_tune_text"):
            with problems:
                value = getattr(self, name)
                if not isinstance(value, str) and (name == "model" or value is not None):
                    raise ValueError(f"{name}={value!r} must be a string")
        with problems:
            # Everything that a run refuses, it says itself.
            TrainConfig(model=self.model, text=self.text, steps=self.steps, batch=self.batch, seq=self.seq, lr=self.lr)
        problems.tell()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def given(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}
