"""What ``lrmoe plan`` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lrmoe.config import require_count, require_number
from lrmoe.problems import Problems
from lrmoe.studies.paper_config import PaperConfig, check_operation, elementwise_setting, floor_setting
from lrmoe.training.config import described

if TYPE_CHECKING:
    from lrmoe.studies.plan import Case


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PaperConfig):
    """What is planned for.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    draws: int = described(1, "synthetic loads, each planned for on its own")
    steps: int | None = described(None, "of a trace the first so many optimizer steps")
    max_drop: float = described(0.2, "largest share of the rows that the backward may leave out")
    quota: Literal["expert", "level"] = described("expert", "how the drop is spread over experts")
    slots: int = described(2, "experts that a rank may hold on top of its own, at most")
    floor: int = floor_setting()
    elementwise: Literal["plain", "fused"] = elementwise_setting()
    experts_only: bool = described(False, "count routed experts alone, not the rest of the model")
    recompute: bool = described(False, "run each layer's forward again before its backward")
    optimizer_shards: int = described(1, "parts that the experts' optimizer state is cut in")
    dense_shards: int | None = described(None, "parts that the rest's weights and states are cut in; default: --ep")

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            super().__post_init__()
        with problems:
            check_operation(slots=self.slots, floor=self.floor, elementwise=self.elementwise)
        for name in ("steps", "optimizer_shards", "dense_shards"):
            with problems:
                if name == "optimizer_shards" or getattr(self, name) is not None:
                    require_count(name, getattr(self, name), least=1)
        with problems:
            if not 0.0 <= require_number("max_drop", self.max_drop) < 1.0:
                raise ValueError(f"max_drop={self.max_drop!r} must be in [0, 1): a share of the rows")
        with problems:
            if self.quota not in ("expert", "level"):
                raise ValueError(f"quota={self.quota!r} is not known; choose one of expert, level")
        with problems:
            if self.experts_only and self.dense_shards is not None:
                raise ValueError(
                    f"dense_shards={self.dense_shards!r} has no effect with experts_only=True; leave one out"
                )
        problems.tell()

    def case(self) -> Case:
        """Reads the files.

        Raises:
            ValueError: if the model, the hardware or the loads cannot be used.
        """
        shape, machine = self.shape(), self.machine()
        from lrmoe.balance import home_ranks
        from lrmoe.studies.plan import Case

        home_ranks(shape.num_experts, self.ep)
        extra: dict[str, Any] = {"optimizer_shards": self.optimizer_shards, "recompute": self.recompute}
        if not self.experts_only:
            extra |= {"dense": True, "dense_shards": self.ep if self.dense_shards is None else self.dense_shards}
        return Case(
            model=shape,
            hardware=machine,
            ranks=self.ep,
            tokens=self.tokens,
            routing=self.routing(shape, steps=self.steps),
            budget=self.budget(machine),
            max_drop=self.max_drop,
            quota=self.quota,
            slots=self.slots,
            floor=self.floor,
            elementwise=self.elementwise,
            memory=extra,
        )
