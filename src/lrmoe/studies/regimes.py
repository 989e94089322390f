"""Where in training a drop is put to the test: from scratch, near zero loss, and at a fine-tuning's loss in between."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lrmoe.config import LRMoEConfig
from lrmoe.studies.cells import Cell
from lrmoe.studies.study_config import StudyConfig
from lrmoe.training.config import TrainConfig

Loss = Literal["eval_loss", "train_loss"]
# A study measures what dropping does, so nothing takes the drop away while it runs.
UNGUARDED = LRMoEConfig(drop=0.0, guard_variance=None, guard_tail=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """A place in training.

    Attributes:
        name, title: on the command line and in words.
        train: the runs that are compared, but for their seed and recalibration.
        pretrain: what all of them go on from, without a drop; None for the model's own initial weights.
        loss: which of a run's losses counts: validation, or the training loss of a run that memorises.
        recalibration: what the variants change: no guard, and from scratch a warm-up.
        settings: what a reader has to know, for the table.
    """

    name: str
    title: str
    train: TrainConfig
    pretrain: TrainConfig | None
    loss: Loss
    recalibration: LRMoEConfig
    settings: Mapping[str, Any]

    def cell(self, recalibration: LRMoEConfig, seed: int, **changes: Any) -> Cell:
        """One run of the regime; ``changes`` replace fields of ``train``."""
        if recalibration.drop == 0:
            # A schedule of nothing: however it is written, it is the same run.
            recalibration = UNGUARDED
        config = replace(self.train, **changes, seed=seed, recalibration=recalibration)
        start = None if self.pretrain is None else Cell(config=replace(self.pretrain, seed=seed))
        return Cell(config=config, start=start)


def regime(name: str, config: StudyConfig) -> Regime:
    """One of :data:`~lrmoe.studies.study_config.REGIMES` at the size of ``config``."""
    steps = config.steps
    scratch = TrainConfig(
        model=config.model,
        text=config.text,
        steps=steps,
        batch=config.batch,
        seq=config.seq,
        lr=config.lr,
        eval_every=max(1, steps // 6),
        save_every=steps,
        recalibration=UNGUARDED,
    )
    common = {"model": config.model, "sequences a step": config.batch, "seeds": len(config.seeds)}
    if name == "scratch":
        warm = round(config.warmup * steps)
        return Regime(
            name=name,
            title="From scratch",
            train=scratch,
            pretrain=None,
            loss="eval_loss",
            recalibration=replace(UNGUARDED, warmup_steps=warm),
            settings={
                **common,
                "steps": steps,
                "tokens a sequence": config.seq,
                **({"steps of warm-up without a drop": warm} if warm else {}),
            },
        )
    half = steps // 2
    later = replace(scratch, steps=half, eval_every=max(1, half // 6), save_every=half)
    if name == "near_zero":
        seq = max(2, config.seq // 2)
        return Regime(
            name=name,
            title="Near zero loss",
            train=replace(later, seq=seq, memorize_bytes=config.memorize_bytes),
            pretrain=scratch,
            loss="train_loss",
            recalibration=UNGUARDED,
            settings={
                **common,
                "steps before, without a drop": steps,
                "steps": half,
                "tokens a sequence": seq,
                "bytes repeated": config.memorize_bytes,
            },
        )
    text = config.fine_tune_text or str(_topics())
    return Regime(
        name=name,
        title="Fine-tuning",
        train=replace(later, text=text, lr=config.lr / 2),
        pretrain=scratch,
        loss="eval_loss",
        recalibration=UNGUARDED,
        settings={
            **common,
            "steps before, without a drop": steps,
            "steps": half,
            "tokens a sequence": config.seq,
            "text": config.fine_tune_text or "help topics of the Python standard library",
        },
    )


def _topics() -> Path:
    """English prose that every Python brings: another kind of text than its source."""
    return Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
