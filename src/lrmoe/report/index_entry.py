"""A row of the index: one run folder, with the few numbers that are shown of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["finished", "unfinished", "diverged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One training's result: what a point of the index's charts is.

    Args:
        setting: the recalibration in words; trainings that share it differ by seed.
        drop: of the backward; None where the records do not say.
        loss: validation loss in nats per token.
        kept_share: of the token-expert pairs, in [0, 1].
        moe_seconds: forward and backward of all MoE layers in one optimizer step.
    """

    setting: str
    seed: int | None
    drop: float | None
    loss: float
    kept_share: float | None
    moe_seconds: float | None


@dataclass(kw_only=True, slots=True)
class Entry:
    """One run folder. ``problem`` says what keeps it from being read; the other values are then what is known.

    Args:
        name: the path from the index's folder, with slashes.
        setting: drop and selector, variants, or policies.
        outcome: of what is no training, in a sentence.
        done, planned: optimizer steps, over all runs of a comparison.
        kind: what was trained on what for how long, in words; empty where that is not known.
        alike: what must be equal for two losses to be of the same thing.
        timed_alike: the same for two times.
    """

    path: Path
    name: str
    command: str = ""
    problem: str | None = None
    page_problem: str | None = None
    state: State = "unfinished"
    model: str = ""
    setting: str = ""
    outcome: str = ""
    done: int | None = None
    planned: int | None = None
    eval_loss: float | None = None
    train_loss: float | None = None
    kept_share: float | None = None
    kept_importance_share: float | None = None
    variance_share: float | None = None
    guarded: int | None = None
    moe_seconds: float | None = None
    changed: float = 0.0
    kind: str = ""
    alike: str = ""
    timed_alike: str = ""
    results: list[Result] = field(default_factory=list)

    @property
    def is_training(self) -> bool:
        return self.command in ("train", "compare")
