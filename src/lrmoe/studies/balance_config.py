"""What ``lrmoe balance`` is told of loads to plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lrmoe.balance.shapes import SHAPES
from lrmoe.cluster import Hardware, ModelShape, model
from lrmoe.problems import Problems
from lrmoe.studies.expert import Expert
from lrmoe.studies.paper_config import DEFAULT_HARDWARE, DEFAULT_MODEL, assumptions, experts_of, rates_of
from lrmoe.studies.sources import check_one_source, check_planning, check_sizes
from lrmoe.training.config import described

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 4
"""Of the shapes that change from step to step."""


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """What is planned, and how.

    The loads come from exactly one of ``loads``, ``shape`` and ``skew`` (2 if none is given). Sizes that are None are
    those of the model, 8 ranks and 4096 tokens for a skew, 16 experts, 4 ranks, 512 tokens and 2 experts a token for a
    shape, and for a file what it holds, with as many experts a token as the model has. A model counts with the widths
    of its experts: loads may be of another number of them.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    loads: str | None = described(None, "JSON file: matrix (ranks, experts) of pairs, several, or one load an expert")
    skew: float | None = described(None, "synthetic loads, or of --workload zipf: largest over mean rows of a rank (2)")
    shape: str | None = described(None, f"synthetic loads of a shape: {', '.join(SHAPES)}")
    experts: int | None = described(None, "experts of synthetic loads (the model's; 16 for a shape)")
    ranks: int | None = described(
        None,
        "ranks of synthetic loads (8; 4 for a shape), of a file with one load an expert, or to deal a trace out over",
    )
    tokens: int | None = described(None, "tokens of a rank, of synthetic loads (4096; 512 for a shape)")
    top_k: int | None = described(None, "experts a token (the model's; 2 for a shape)")
    seed: int | None = described(None, "of loads with a skew, or of a workload (0)")
    drop: float = described(0.2, "share of the rows that the backward may leave out")
    quota: Literal["expert", "level"] = described("expert", "how the drop is spread over experts")
    slots: int = described(1, "replicas a rank may hold, of policies with a total: experts on top of its own")
    capacity: float | None = described(None, "rows whose backward a rank can hold; default: no limit")
    floor: int = described(1024, "rows that a replica of UltraEP must take where its fast path fails")
    model: str = described(
        DEFAULT_MODEL, "preset, or a Transformers config.json: whose experts; of a trace its own widths unless given"
    )
    hardware: str = described(DEFAULT_HARDWARE, "preset, or a TOML or JSON file")
    dim: int | None = described(None, "model width, in place of the model's")
    expert_dim: int | None = described(None, "expert width, in place of the model's")
    flops: float | None = described(None, "operations a second that a rank reaches, in place of the hardware's")
    bandwidth: float | None = described(
        None, "bytes a second between a rank and the others, each way, in place of the hardware's"
    )

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            check_one_source(loads=self.loads, skew=self.skew, shape=self.shape)
        for name in ("experts", "tokens", "seed") if self.loads is not None else ():
            with problems:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is of synthetic loads; leave it out with loads={self.loads!r}"
                    )
        with problems:
            if self.shape is not None and self.seed is not None:
                raise ValueError(f"seed={self.seed!r} has no effect on a shape, which draws nothing; leave it out")
        with problems:
            check_sizes(experts=self.experts, ranks=self.ranks, tokens=self.tokens, top_k=self.top_k, seed=self.seed)
        with problems:
            check_planning(drop=self.drop, quota=self.quota, slots=self.slots, capacity=self.capacity, floor=self.floor)
        with problems:
            self.shape_of_experts()
        with problems:
            self.machine()
        problems.tell()

    def shape_of_experts(self) -> ModelShape:
        """The model, with the widths and the choices that are asked for.

        Raises:
            ValueError: where it is neither a preset nor a config.json, or of another number of experts.
        """
        shape = experts_of(self.model, dim=self.dim, expert_dim=self.expert_dim)
        return replace(shape, top_k=self.choices, num_experts=max(self.choices, shape.num_experts))

    def machine(self) -> Hardware:
        """What the ranks are; ValueError where it is neither a preset nor a file of one."""
        return rates_of(self.hardware, flops=self.flops, bandwidth=self.bandwidth)

    @property
    def expert(self) -> Expert:
        """Its size in bytes."""
        shape = self.shape_of_experts()
        return Expert(dim=shape.dim, expert_dim=shape.expert_dim)

    @property
    def choices(self) -> int:
        """Experts a token."""
        return self.top_k if self.top_k is not None else 2 if self.shape else model(self.model).top_k

    @property
    def assumed(self) -> str:
        """What the times rest on, in a line."""
        return assumptions(self.shape_of_experts(), self.machine())

    def load(self) -> tuple[str, list[Tensor]]:
        """What the loads are, in words, and the matrices.

        Raises:
            ValueError: if the file cannot be used, or a size or the skew is out of range.
        """
        from lrmoe.studies.loads import read_loads, shaped_loads, skewed_loads

        if self.loads is not None:
            matrices = read_loads(Path(self.loads), self.ranks)
            return self.loads, matrices
        experts, ranks, tokens = (16, 4, 512) if self.shape else (model(self.model).num_experts, 8, 4096)
        sizes = {
            "num_experts": experts if self.experts is None else self.experts,
            "num_ranks": ranks if self.ranks is None else self.ranks,
            "tokens": tokens if self.tokens is None else self.tokens,
            "top_k": self.choices,
        }
        if self.shape is not None:
            steps = STEPS if self.shape in ("rotating", "burst") else 1
            return f"synthetic, {self.shape}", [shaped_loads(self.shape, step=step, **sizes) for step in range(steps)]
        skew = 2.0 if self.skew is None else self.skew
        return f"synthetic, max/mean {skew:g}", [skewed_loads(skew, seed=self.seed or 0, **sizes)]
