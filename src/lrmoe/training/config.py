"""Everything that defines a training run, validated when built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from lrmoe.balance import names
from lrmoe.config import LRMoEConfig
from lrmoe.problems import Problems

SCHEDULES = ("cosine", "linear", "constant")
POLICIES = names()
REPORTERS = ("tensorboard", "wandb", "trackio")
# How the work is spread over processes; a run may be resumed with other values.
PARALLEL = ("ep", "policy", "slots", "capacity", "rank_timeout")
# What changes nothing of the training; a run may be resumed with other values.
OUTSIDE = ("threads", "report_to", *PARALLEL)

# The least that a count may be.
_COUNTS = {
    **dict.fromkeys(("steps", "batch", "seq", "grad_accum", "log_every", "eval_every", "eval_sequences"), 1),
    **dict.fromkeys(("save_every", "keep_checkpoints", "ep", "threads", "memorize_bytes"), 1),
    **dict.fromkeys(("lr_warmup_steps", "seed", "slots"), 0),
}
_OPTIONAL = ("threads", "memorize_bytes", "slots")


def described(default: Any, text: str) -> Any:
    """A field of a settings dataclass: its default, and the help of the option that the command line makes of it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run; the same values on the same machine give the same run, bit for bit on CPU.

    ``recalibration`` takes its ``seed`` and, unless it is set, its ``total_steps`` from the run.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    model: str = described(
        "qwen3-moe-tiny",
        "preset (qwen3-moe-tiny, glm4-moe-tiny, qwen3-moe-nano), or folder of a checkpoint in Transformers' format",
    )
    text: str | None = described(None, "file or folder to train on; default: the Python standard library's source")
    steps: int = described(400, "optimizer steps")
    batch: int = described(16, "sequences per microbatch")
    seq: int = described(128, "tokens per sequence")
    grad_accum: int = described(1, "microbatches per optimizer step")
    lr: float = described(2e-3, "peak learning rate of AdamW")
    lr_schedule: Literal["cosine", "linear", "constant"] = described("cosine", "learning rate after its warm-up")
    lr_warmup_steps: int = described(20, "steps over which the learning rate rises from zero")
    weight_decay: float = described(0.1, "AdamW's weight decay")
    seed: int = described(0, "of the initial weights, the data order and the selection's draws")
    log_every: int = described(10, "steps between two lines of metrics.jsonl")
    eval_every: int = described(100, "steps between two validations; the last step is always validated")
    eval_sequences: int = described(256, "sequences to validate on, at most")
    save_every: int = described(100, "steps between two checkpoints; the last step is always saved")
    keep_checkpoints: int = described(2, "newest checkpoints to keep")
    gradient_checkpointing: bool = described(False, "recompute each block's activations in the backward")
    bf16: bool = described(False, "bfloat16 autocast over float32 weights")
    threads: int | None = described(None, "CPU threads; default: torch's own choice")
    memorize_bytes: int | None = described(
        None, "train and validate on the first so many bytes of the training text, over and over"
    )
    trace: bool = described(
        False, "record how many pairs each rank sends to each expert, of every layer and microbatch, in trace/"
    )
    report_to: str = described(
        "tensorboard",
        "who gets the metrics beside metrics.jsonl: one or more of tensorboard, wandb and trackio, with commas between "
        "them, or none",
    )
    ep: int = described(
        1, "processes that share the experts, each with its part of every batch; started here, or by torchrun"
    )
    policy: str = described("lrmoe", "with ep above 1: how the load is balanced over the ranks")
    slots: int | None = described(
        None,
        "with ep above 1: replicas of experts a rank may hold, or, with policies that fill all slots anew, experts in "
        "all; default: the policy's own",
    )
    capacity: float | None = described(
        None, "with ep above 1: a rank's largest load in a layer, in rows weighted by cost; default: 1.05 x the mean"
    )
    rank_timeout: float = described(600.0, "with ep above 1: seconds to wait for another rank before the run ends")
    recalibration: LRMoEConfig = field(default_factory=LRMoEConfig)

    def __post_init__(self) -> None:
        problems = Problems()
        for name, least in _COUNTS.items():
            with problems:
                if getattr(self, name) is not None or name not in _OPTIONAL:
                    _count(name, getattr(self, name), least)
        for name in ("lr", "weight_decay"):
            with problems:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ValueError(f"{name}={value!r} must be a finite number >= 0")
        with problems:
            if self.lr_schedule not in SCHEDULES:
                raise ValueError(f"lr_schedule={self.lr_schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
        with problems:
            self._check_reporters()
        with problems:
            self._check_policy()
        # What follows holds such numbers against each other.
        problems.tell()
        with problems:
            if self.seed >= 2**32:
                raise ValueError(f"seed={self.seed} must be below 2**32")
        with problems:
            if self.seq < 2:
                raise ValueError(f"seq={self.seq} must be at least 2: each token but the first is predicted")
        with problems:
            if self.lr == 0:
                raise ValueError("lr=0 trains nothing; give a number above 0")
        with problems:
            if self.batch % self.ep:
                raise ValueError(
                    f"batch={self.batch} cannot be shared out equally to ep={self.ep} ranks; give a multiple of "
                    f"{self.ep}"
                )
        with problems:
            if self.save_every % self.log_every and self.save_every < self.steps:
                raise ValueError(
                    f"save_every={self.save_every} must be a multiple of log_every={self.log_every}, so that a resumed "
                    "run logs what an uninterrupted one logs"
                )
        problems.tell()
        if self.recalibration.seed != self.seed:
            object.__setattr__(self, "recalibration", replace(self.recalibration, seed=self.seed))

    @property
    def reporters(self) -> tuple[str, ...]:
        """The names in ``report_to``; empty for ``none``."""
        return tuple(name.strip() for name in self.report_to.split(",")) if self.report_to != "none" else ()

    def _check_reporters(self) -> None:
        known = f"one or more of {', '.join(REPORTERS)} with commas between them, or none"
        if not isinstance(self.report_to, str):
            raise ValueError(f"report_to={self.report_to!r} must be a string: {known}")
        for name in self.reporters:
            if name not in REPORTERS:
                raise ValueError(f"report_to={self.report_to!r}: {name!r} is not known here; give {known}")
            if self.reporters.count(name) > 1:
                raise ValueError(f"report_to={self.report_to!r} names {name} twice; give {known}")

    def _check_policy(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not known; choose one of {', '.join(POLICIES)}")
        for name in ("capacity", "rank_timeout"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ValueError(f"{name}={value!r} must be a finite number above 0")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ``recalibration`` nested."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "recalibration"}
        return {**plain, "recalibration": self.recalibration.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: for a missing or unknown field.
        """
        known = {f.name for f in fields(cls)}
        # What runs of before this setting did; it changes nothing of the training.
        values = {"report_to": "tensorboard", **values}
        if set(values) != known:
            odd = ", ".join(sorted(set(values) ^ known))
            raise ValueError(f"these settings are not of this version of lrmoe (missing or unknown: {odd})")
        problems = Problems()
        with problems:
            try:
                recalibration = LRMoEConfig(**values["recalibration"])
            except TypeError as error:
                raise ValueError(f"recalibration settings are not of this version of lrmoe: {error}") from None
        with problems:
            config = cls(**{**values, "recalibration": LRMoEConfig()})
        problems.tell()
        return replace(config, recalibration=recalibration)


def _count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}")
