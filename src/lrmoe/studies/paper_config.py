"""What ``lrmoe plan``, and whoever else plans on paper, is told: a model, the ranks it lies on, the loads they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lrmoe.cluster import Elementwise, Hardware, ModelShape, hardware, model
from lrmoe.config import require_count, require_number
from lrmoe.problems import Problems
from lrmoe.studies.sources import check_files, check_one_source
from lrmoe.training.config import described
from lrmoe.training.files import check_free

if TYPE_CHECKING:
    from lrmoe.studies.routing import Routing

Config = TypeVar("Config", bound="PaperConfig")
GIB = 2**30
DEFAULT_MODEL, DEFAULT_HARDWARE = "qwen3-30b-a3b", "h100"
FASTER = 0.97
"""Replicas pay where they bring a layer's time to at most this much of fixed ownership's."""
ELEMENTWISE: tuple[Elementwise, ...] = ("plain", "fused")


@dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """Settings of a model on paper; a verb gives its own default, or words, to a field by declaring it again.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    model: str = described(DEFAULT_MODEL, "preset, or a Transformers config.json")
    hardware: str = described(DEFAULT_HARDWARE, "preset, or a TOML or JSON file")
    ep: int = described(8, "ranks that the experts lie on")
    seq: int = described(4096, "tokens of a sequence")
    microbatch: int = described(1, "sequences of a rank in one forward")
    budget_gib: float | None = described(None, "GiB of a rank; default: all that the hardware has")
    trace: str | None = described(None, "routing trace: run folder of lrmoe train --trace, its trace/ or a part")
    loads: str | None = described(None, "JSON file: matrix (ranks, experts) of pairs, several, or one load an expert")
    skew: float | None = described(None, "synthetic loads: largest over mean rows of a rank (2)")
    seed: int = described(0, "of synthetic loads")
    draws: int = described(1, "synthetic loads, each of them a matrix of its own")

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("ep", "seq", "microbatch", "draws"):
            with problems:
                require_count(name, getattr(self, name), least=1)
        with problems:
            require_count("seed", self.seed)
        with problems:
            if self.budget_gib is not None and not 0 < require_number("budget_gib", self.budget_gib) < float("inf"):
                raise ValueError(f"budget_gib={self.budget_gib!r} must be a finite number above 0")
        with problems:
            check_one_source(trace=self.trace, loads=self.loads, skew=self.skew)
        with problems:
            if self.skew is not None and not 1 <= require_number("skew", self.skew) <= self.ep:
                raise ValueError(
                    f"skew={self.skew!r} must be between 1 and the number of ranks, {self.ep}: largest over mean"
                )
        problems.tell()

    @property
    def tokens(self) -> int:
        """Of a rank in one microbatch."""
        return self.seq * self.microbatch

    def shape(self) -> ModelShape:
        """Of the model; ValueError where it is neither a preset nor a config.json."""
        return model(self.model)

    def machine(self) -> Hardware:
        """What its ranks are; ValueError where it is neither a preset nor a file of one."""
        return hardware(self.hardware)

    def budget(self, machine: Hardware) -> float:
        """Bytes that a rank of the machine may use."""
        return machine.memory_bytes if self.budget_gib is None else self.budget_gib * GIB

    def routing(self, shape: ModelShape, *, steps: int | None = None) -> Routing:
        """The loads; see :func:`lrmoe.studies.paper_loads.routing_for`.

        Raises:
            ValueError: if they cannot be used.
        """
        from lrmoe.studies.paper_loads import routing_for

        return routing_for(
            shape,
            ranks=self.ep,
            tokens=self.tokens,
            trace=self.trace,
            loads=self.loads,
            skew=self.skew,
            seed=self.seed,
            draws=self.draws,
            steps=steps,
        )


def read_settings(
    kind: type[Config],
    given: Mapping[str, Any],
    out: Path | None,
    *,
    overwrite: bool,
    verb: str,
    program: str = "lrmoe",
) -> Config:
    """A config, with what it names checked as far as it can be told without a look at the loads, and with the folder
    its study is to be written to.

    Args:
        kind: of the config.
        given: its fields that are not left at their defaults.
        out: the folder; None where nothing is written.
        overwrite: what ``verb`` wrote there before may go.
        verb: of the command line.
        program: what is typed before the verb.

    Raises:
        ValueError: naming the fields, their values and what they may be.
    """
    problems = Problems()
    with problems:
        config = kind(**given)
    for field, look in (("model", model), ("hardware", hardware)):
        with problems:
            if field in given:
                look(given[field])
    with problems:
        check_files(trace=given.get("trace"), loads=given.get("loads"))
    with problems:
        if out is not None:
            check_free(out, overwrite=overwrite, command=verb, program=program)
    problems.tell()
    return config


def experts_of(which: str, *, dim: int | None = None, expert_dim: int | None = None) -> ModelShape:
    """A model by name or file, with other widths where they are given.

    Raises:
        ValueError: where it is neither a preset nor a config.json, or a width is no count.
    """
    shape = model(which)
    if dim is None and expert_dim is None:
        return shape
    wide = shape.dim if dim is None else require_count("dim", dim, least=1)
    narrow = shape.expert_dim if expert_dim is None else require_count("expert_dim", expert_dim, least=1)
    return replace(shape, dim=wide, expert_dim=narrow, name=f"experts of {wide} x {narrow}", source="widths as given")


def rates_of(which: str, *, flops: float | None = None, bandwidth: float | None = None) -> Hardware:
    """Hardware by name or file, with other rates, as they are reached, where they are given.

    Raises:
        ValueError: where it is neither a preset nor a file of one, or a rate is not a finite number above 0.
    """
    machine = hardware(which)
    changed: dict[str, Any] = {}
    for name, value in (("flops", flops), ("bandwidth", bandwidth)):
        if value is not None and not 0 < require_number(name, value) < float("inf"):
            raise ValueError(f"{name}={value!r} must be a finite number above 0")
    if flops is not None:
        changed |= {"flops": flops, "gemm_efficiency": 1.0}
    if bandwidth is not None:
        changed |= {"intra_bytes_per_s": bandwidth, "inter_bytes_per_s": bandwidth, "link_efficiency": 1.0}
    return replace(machine, **changed, source=f"{machine.source}; rates as given") if changed else machine


def assumptions(shape: ModelShape, machine: Hardware) -> str:
    """What a layer's time is worked out with, in a line for a reader."""
    links = dict.fromkeys(
        f"{rate * machine.link_efficiency / 1e9:,.3g}"
        for rate in (machine.intra_bytes_per_s, machine.inter_bytes_per_s)
    )
    return (
        f"{shape.name}, {shape.dim} x {shape.expert_dim}, {shape.top_k} a token, on {machine.name}: "
        f"{machine.flops * machine.gemm_efficiency / 1e12:,.3g} Tflop/s and {' and '.join(links)} GB/s each way"
        f"{' (in a node and between nodes)' if len(links) > 1 else ''} reached; save=preactivation, activations plain, "
        "nothing recomputed, nothing overlaps"
    )


# Settings that several verbs have, each in its own place among those that only one of them has.


def floor_setting() -> Any:
    """The field ``floor``."""
    return described(1024, "rows that a replica of UltraEP must take where its fast path fails")


def elementwise_setting() -> Any:
    """The field ``elementwise``."""
    return described("plain", "how activations run: as here on a GPU, or in one kernel")


def check_operation(*, slots: int, floor: int, elementwise: str) -> None:
    """Checks what the ranks do.

    Args:
        slots: experts that a rank may hold on top of its own.
        floor, elementwise: of the fields above.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    problems = Problems()
    with problems:
        require_count("slots", slots)
    with problems:
        require_count("floor", floor, least=1)
    with problems:
        if elementwise not in ELEMENTWISE:
            raise ValueError(f"elementwise={elementwise!r} is not known; choose one of {', '.join(ELEMENTWISE)}")
    problems.tell()
