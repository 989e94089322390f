"""What ``python -m paper pressure`` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lrmoe.config import Save, require_number
from lrmoe.problems import Problems
from lrmoe.studies.paper_config import PaperConfig, check_operation, elementwise_setting, floor_setting
from lrmoe.training.config import described

POLICIES = "fixed,symi,ultraep,lrmoe"
PRESSURES = (*range(1, 21), 24, 28, 32, 40)


@dataclass(frozen=True, kw_only=True)
class PressureConfig(PaperConfig):
    """One MoE layer of a model under a growing batch.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    seq: int = described(8192, "tokens of a sequence")
    microbatch: int = described(4, "sequences of a rank at pressure 1")
    budget_gib: float | None = described(None, "GiB a rank has for one layer; default: all that the hardware has")
    draws: int = described(5, "synthetic loads that are averaged over")
    slots: int = described(2, "experts a rank may hold on top of its own")
    floor: int = floor_setting()
    min_keep: float = described(0.5, "share of its rows that the backward of every expert keeps at least, under LRMoE")
    save: Literal["preactivation", "input"] = described("preactivation", "what LRMoE's operator keeps from the forward")
    elementwise: Literal["plain", "fused"] = elementwise_setting()
    policies: str = described(POLICIES, "comma-separated, options after colons, e.g. symi:slots=20,ultraep")
    pressures: str | None = described(None, "comma-separated; default: 1 to 20, 24, 28, 32, 40")
    at: float = described(20.0, "pressure at which the order of the systems is looked at for other skews")

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            super().__post_init__()
        with problems:
            check_operation(slots=self.slots, floor=self.floor, elementwise=self.elementwise)
        with problems:
            if not 0.0 < require_number("min_keep", self.min_keep) <= 1.0:
                raise ValueError(
                    f"min_keep={self.min_keep!r} must be above 0 and at most 1: a share of an expert's rows"
                )
        with problems:
            if not 0 < require_number("at", self.at) < float("inf"):
                raise ValueError(f"at={self.at!r} must be a finite number above 0")
        with problems:
            if self.save not in get_args(Save):
                raise ValueError(f"save={self.save!r} is not known; choose one of {', '.join(get_args(Save))}")
        with problems:
            self.levels  # noqa: B018  Checks itself.
        problems.tell()

    @property
    def levels(self) -> tuple[float, ...]:
        """The pressures, ascending."""
        if self.pressures is None:
            return tuple(map(float, PRESSURES))
        try:
            found = sorted({float(part) for part in self.pressures.split(",")})
        except ValueError:
            raise ValueError(f"pressures={self.pressures!r} is no list of numbers such as 1,2,4,8") from None
        if not all(0 < level < float("inf") for level in found):
            raise ValueError(f"pressures={self.pressures!r}: each must be a finite number above 0")
        return tuple(found)
