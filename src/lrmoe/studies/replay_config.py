"""What ``lrmoe balance --trace`` and ``--workload`` are told of a run to play."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lrmoe.balance import names
from lrmoe.balance.shapes import WORKLOADS
from lrmoe.cluster import Hardware, ModelShape
from lrmoe.config import require_count
from lrmoe.problems import Problems
from lrmoe.studies.paper_config import DEFAULT_HARDWARE, DEFAULT_MODEL, experts_of, rates_of
from lrmoe.studies.sources import check_one_source, check_planning, check_sizes
from lrmoe.training.config import described

if TYPE_CHECKING:
    from lrmoe.studies.replay import Choice, Setting
    from lrmoe.studies.routing import Routing

SYNTHETIC_STEPS = 40
_SIZES = {"experts": 128, "ranks": 8, "tokens": 4096, "top_k": 8, "seed": 0, "steps": SYNTHETIC_STEPS}


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is played to which policies.

    The loads come from exactly one of ``trace`` and ``workload``. Sizes that are None are those of a trace, or 128
    experts, 8 ranks, 4096 tokens and 8 experts a token for a workload. Experts' widths that are None are the model's,
    without one those that a trace names, else the default model's.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    trace: str | None = described(None, "routing trace: run folder of lrmoe train --trace, its trace/ or a part")
    workload: str | None = described(None, f"synthetic run: {', '.join(WORKLOADS)}")
    policies: str | None = described(
        None, f"comma-separated, options after colons, e.g. symi,laer:node_size=4; default: {', '.join(names())}"
    )
    steps: int | None = described(
        None, f"optimizer steps: of a workload ({SYNTHETIC_STEPS}); of a trace the first so many"
    )
    layers: int | None = described(None, "MoE layers that memory is counted for; default: those of the trace, 1")
    skew: float | None = described(None, "of the workload zipf: largest over mean rows of a rank (2)")
    experts: int | None = described(None, "experts of a workload (128)")
    ranks: int | None = described(None, "ranks of a workload (8), or to deal the loads of a trace out over")
    tokens: int | None = described(None, "tokens of a rank, of a workload (4096)")
    top_k: int | None = described(None, "experts a token, of a workload (8)")
    seed: int | None = described(None, "of a workload's draws (0)")
    drop: float = described(0.2, "share of the rows that the backward may leave out")
    quota: Literal["expert", "level"] = described("expert", "how the drop is spread over experts")
    slots: int = described(1, "experts a rank may hold on top of its own")
    capacity: float | None = described(None, "rows whose backward a rank can hold; default: no limit")
    floor: int = described(1024, "rows that a replica of UltraEP must take where its fast path fails")
    model: str | None = described(None, "preset, or a config.json: whose experts; default: the trace's widths")
    hardware: str = described(DEFAULT_HARDWARE, "preset, or a TOML or JSON file")
    dim: int | None = described(None, "model width, in place of the model's")
    expert_dim: int | None = described(None, "expert width, in place of the model's")
    flops: float | None = described(None, "operations a second that a rank reaches, in place of the hardware's")
    bandwidth: float | None = described(None, "bytes a second to other ranks, each way, in place of the hardware's")

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            check_one_source(trace=self.trace, workload=self.workload)
            if self.trace is None and self.workload is None:
                raise ValueError("give a trace or a workload, which say what the loads are")
        for name in ("experts", "tokens", "top_k", "seed", "skew") if self.trace is not None else ():
            with problems:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is of workloads; leave it out with trace={self.trace!r}"
                    )
        for name in ("steps", "layers"):
            with problems:
                if getattr(self, name) is not None:
                    require_count(name, getattr(self, name), least=1)
        with problems:
            check_sizes(experts=self.experts, ranks=self.ranks, tokens=self.tokens, top_k=self.top_k, seed=self.seed)
        with problems:
            check_planning(drop=self.drop, quota=self.quota, slots=self.slots, capacity=self.capacity, floor=self.floor)
        with problems:
            self.shape_of_experts({})
        with problems:
            self.machine()
        problems.tell()

    def choices(self) -> list[Choice]:
        """The policies, fixed ownership first."""
        from lrmoe.studies.replay import parse_choices

        return parse_choices(self.policies)

    def routing(self) -> Routing:
        """The loads.

        Raises:
            ValueError: if the trace cannot be used, or a workload cannot be had.
        """
        from lrmoe.studies.routing import recorded, synthetic

        if self.trace is not None:
            return recorded(Path(self.trace), ranks=self.ranks, steps=self.steps)
        assert self.workload is not None
        sizes = {
            name: default if getattr(self, name) is None else getattr(self, name) for name, default in _SIZES.items()
        }
        return synthetic(self.workload, skew=self.skew, **sizes)

    def shape_of_experts(self, about: dict[str, Any]) -> ModelShape:
        """Whose experts; ``about`` is what a trace says of its model."""
        own: dict[str, int | None] = {"dim": self.dim, "expert_dim": self.expert_dim}
        for name in own if self.model is None else ():
            told = about.get(name)
            if own[name] is None and isinstance(told, int) and told > 0:
                own[name] = told
        shape = experts_of(self.model or DEFAULT_MODEL, **own)
        choices = about.get("top_k") or self.top_k or shape.top_k
        return replace(shape, top_k=choices, num_experts=max(choices, shape.num_experts))

    def machine(self) -> Hardware:
        """What the ranks are; ValueError where it is neither a preset nor a file of one."""
        return rates_of(self.hardware, flops=self.flops, bandwidth=self.bandwidth)

    def setting(self, routing: Routing) -> Setting:
        """What the policies share."""
        from lrmoe.studies.price import Price
        from lrmoe.studies.replay import Setting
        from lrmoe.studies.systems import Sizes

        _, ranks, experts = routing.shape
        layers = len(set(routing.layer)) if self.layers is None else self.layers
        price = Price(model=self.shape_of_experts(routing.about), hardware=self.machine())
        return Setting(
            sizes=Sizes(experts=experts, ranks=ranks, layers=layers, expert=price.expert(ranks)),
            price=price,
            slots=self.slots,
            capacity=self.capacity,
            floor=self.floor,
            quota=self.quota,
        )
