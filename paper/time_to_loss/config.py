"""What the study of time to loss is told, and which contenders that makes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from lrmoe.config import LRMoEConfig, require_count, require_number
from lrmoe.training.config import described
from paper.time_to_loss.curves import Setting
from paper.time_to_loss.run import Contender, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeToLossConfig:
    """The study of time to loss.

    ``seeds`` and ``even_seeds`` each give initial weights, data order and draws.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    text: str | None = described(None, "file or folder to train on; default: the Python standard library's source")
    layers: int = described(1, "blocks with a MoE layer, after a first one without")
    dim: int = described(256, "D, the model's width")
    expert_dim: int = described(1024, "F, the width of an expert")
    num_experts: int = described(8, "E, experts of a layer")
    top_k: int = described(2, "K, experts a token visits")
    heads: int = described(4, "heads of the attention; must divide dim")
    batch: int = described(8, "sequences a step, of all ranks together")
    seq: int = described(128, "tokens of a sequence")
    steps: int = described(160, "optimizer steps")
    lr: float = described(2e-3, "learning rate of AdamW, constant after its warm-up")
    lr_warmup_steps: int = described(20, "steps over which the learning rate rises from zero")
    weight_decay: float = described(0.1, "AdamW's weight decay, of matrices")
    ranks: int = described(2, "expert-parallel ranks, as processes of this machine; 1 leaves those settings out")
    slots: int = described(1, "experts of others that a rank has room for")
    bandwidth: float = described(5e9, "bytes a second that a rank sends, and receives at the same time")
    balance_loss_weight: float = described(0.01, "weight of the router's balancing loss where loads are even")
    warmup: float = described(0.1, "share of the steps before which LRMoE drops nothing")
    eval_every: int = described(8, "steps between two validations; the loss between them is interpolated")
    targets: tuple[float, ...] = (0.5, 0.75, 0.95)
    drops: tuple[float, ...] = (0.2, 0.3, 0.5)
    recommended: float = described(0.2, "the drop that is held against the baselines; one of drops")
    seeds: tuple[int, ...] = (0, 1, 2)
    even_seeds: tuple[int, ...] = (0, 1)
    eval_sequences: int = described(24, "sequences to validate on, at most; the same each time")
    rank_timeout: float = described(600.0, "seconds that a rank waits for the others")

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "expert_dim", "num_experts", "top_k", "heads", "batch", "steps", "ranks"):
            require_count(name, getattr(self, name), least=1)
        for name in ("eval_every", "eval_sequences"):
            require_count(name, getattr(self, name), least=1)
        for name in ("slots", "lr_warmup_steps"):
            require_count(name, getattr(self, name))
        require_count("seq", self.seq, least=2)
        for name in ("lr", "bandwidth", "rank_timeout"):
            if not 0 < require_number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a finite number above 0")
        for name in ("weight_decay", "balance_loss_weight"):
            if not 0 <= require_number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a finite number >= 0")
        if not 0 <= require_number("warmup", self.warmup) < 1:
            raise ValueError(f"warmup={self.warmup!r} must be in [0, 1), a share of the steps")
        if self.dim % self.heads:
            raise ValueError(f"heads={self.heads} must divide dim={self.dim}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be at most num_experts={self.num_experts}")
        self._check_ranks()
        self._check_lists()

    def _check_ranks(self) -> None:
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} must be a multiple of ranks={self.ranks}: all get as many sequences")
        if self.eval_sequences < self.ranks:
            raise ValueError(f"eval_sequences={self.eval_sequences} must be at least ranks={self.ranks}")
        if self.ranks > self.num_experts:
            raise ValueError(f"ranks={self.ranks} must be at most num_experts={self.num_experts}")

    def _check_lists(self) -> None:
        for name in ("drops", "targets"):
            for value in getattr(self, name):
                require_number(name, value)
        if not self.drops or len(set(self.drops)) != len(self.drops) or not all(0 < drop < 1 for drop in self.drops):
            raise ValueError(f"drops={list(self.drops)} must be one or more different shares between 0 and 1")
        if self.recommended not in self.drops:
            raise ValueError(f"recommended={self.recommended!r} must be one of drops={list(self.drops)}")
        if not self.targets or sorted(set(self.targets)) != list(self.targets):
            raise ValueError(f"targets={list(self.targets)} must be one or more shares of the steps, rising")
        if self.targets[-1] > 1 or self.targets[0] * self.steps < 1:
            raise ValueError(
                f"targets={list(self.targets)} must be shares of the steps up to 1, the first at least one step of "
                f"steps={self.steps}"
            )
        for name in ("seeds", "even_seeds"):
            seeds = getattr(self, name)
            for seed in seeds:
                require_count(name, seed)
            if not seeds or len(set(seeds)) != len(seeds):
                raise ValueError(f"{name}={list(seeds)} must be one or more different integers")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def sizes(self) -> Sizes:
        """What a cell needs of this."""
        return Sizes(**{one.name: getattr(self, one.name) for one in fields(Sizes)})

    def settings(self) -> list[Setting]:
        """One device, and over ranks with uneven and with even loads."""
        one = Setting(
            name="one-device",
            title="One device",
            ranks=1,
            balance_loss_weight=self.balance_loss_weight,
            contenders=self._alone(),
            seeds=self.seeds,
        )
        skewed = Setting(
            name="skewed",
            title=f"{self.ranks} ranks, no balancing loss",
            ranks=self.ranks,
            balance_loss_weight=0.0,
            contenders=self._parallel(),
            seeds=self.seeds,
        )
        even = replace(
            skewed,
            name="even",
            title=f"{self.ranks} ranks, balancing loss {self.balance_loss_weight:g}",
            balance_loss_weight=self.balance_loss_weight,
            seeds=self.even_seeds,
        )
        return [one, skewed, even] if self.ranks > 1 else [one]

    def recalibration(self, drop: float, **changes: Any) -> LRMoEConfig:
        """LRMoE with this drop. The guard is off: a rate is the rate that the table names."""
        warmup = round(self.warmup * self.steps) if drop else 0
        return LRMoEConfig(drop=drop, warmup_steps=warmup, guard_variance=None, guard_tail=None, **changes)

    def _role(self, drop: float) -> Any:
        return "recipe" if drop == self.recommended else "variant"

    def _alone(self) -> tuple[Contender, ...]:
        exact, dropping = self.recalibration(0.0), self.recommended
        return (
            Contender(name="no drop", role="baseline", policy=None, config=exact),
            *(
                Contender(name=f"pps {drop:.0%}", role=self._role(drop), policy=None, config=self.recalibration(drop))
                for drop in self.drops
            ),
            Contender(
                name=f"random {dropping:.0%}",
                role="yardstick",
                policy=None,
                config=self.recalibration(dropping, selector="random"),
            ),
        )

    def _parallel(self) -> tuple[Contender, ...]:
        exact = self.recalibration(0.0)
        baselines = {"fixed": "fixed", "SYMI": "symi", "UltraEP": "ultraep"}
        return (
            *(Contender(name=n, role="baseline", policy=policy, config=exact) for n, policy in baselines.items()),
            *(
                Contender(
                    name=f"LRMoE {drop:.0%}", role=self._role(drop), policy="lrmoe", config=self.recalibration(drop)
                )
                for drop in self.drops
            ),
        )
