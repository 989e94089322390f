"""A run's loads played to a balancing policy, record by record, as the engine would: plan, observe, step.

Nothing runs here but the planners. Rows and bytes are counted, planning is timed, all other times are modelled: a
layer's as :mod:`lrmoe.studies.price` has it, for ``lrmoe plan`` too, and what each system sends for its copies and
moves as :mod:`lrmoe.studies.costs` and :mod:`lrmoe.studies.systems` have it.

Shapes: E experts, G ranks.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance import Plan, Policy, get
from lrmoe.balance.ownership import HistoryPolicy, Move
from lrmoe.cluster.time import Pass
from lrmoe.config import Quota
from lrmoe.evenness import max_over_mean, mean_of_known
from lrmoe.studies.costs import KINDS, Transfer, token_transfers
from lrmoe.studies.expert import Expert
from lrmoe.studies.loads import mean
from lrmoe.studies.price import TRAFFIC, Price
from lrmoe.studies.routing import Routing, p95
from lrmoe.studies.systems import SYSTEMS, Peaks, SharedSlots, Sizes

Record = dict[str, Any]
TOTAL_SLOTS = ("symi", "laer", "flexmoe")
"""Of whose policies ``slots`` are all experts of a rank, not those on top of its own."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A policy by name, with the options that are not the defaults."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As the user would write it."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def parse_choices(text: str | None) -> list[Choice]:
    """Policies from ``"symi,laer:node_size=4:slots=3"``; all nine from None. Fixed ownership always comes first.

    Raises:
        ValueError: if a name, or an option of it, is not known.
    """
    if text is None:
        return [Choice(name=name) for name in SYSTEMS]
    choices = [Choice(name="fixed")]
    for part in text.split(","):
        name, *options = part.strip().split(":")
        if name not in SYSTEMS:
            raise ValueError(f"policies={text!r}: {name!r} is not known; choose of {', '.join(SYSTEMS)}")
        known = list(inspect.signature(type(get(name))).parameters)
        chosen = {}
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or key not in known:
                raise ValueError(
                    f"policies={text!r}: {name!r} has no option {option!r}; its options are {', '.join(known)}"
                )
            try:
                chosen[key] = json.loads(value)
            except ValueError:
                raise ValueError(f"policies={text!r}: {name}:{option} is no number, true, false or null") from None
        choice = Choice(name=name, options=chosen)
        if choice not in choices:
            choices.append(choice)
    return choices


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all policies of a comparison share.

    Args:
        sizes: experts, ranks, layers, size of an expert.
        price: what a layer's time is worked out with.
        slots: experts that a rank may hold on top of its own.
        capacity: rows that the backward of a rank may keep, for policies that know one; None for no limit.
        floor: rows that a replica of UltraEP must at least take where its fast path fails.
        quota: how a drop is spread.
    """

    sizes: Sizes
    price: Price = field(default_factory=Price)
    slots: int = 1
    capacity: float | None = None
    floor: int = 1024
    quota: Quota = "expert"

    def make(self, choice: Choice) -> Policy:
        """A new policy, prepared for these sizes.

        Raises:
            ValueError: if it cannot run with them; says why.
        """
        sizes, expert = self.sizes, self.sizes.expert
        defaults: Record = {}
        if choice.name in TOTAL_SLOTS:
            defaults["slots"] = sizes.home + self.slots
        elif choice.name in ("ultraep", "lrmoe", "eplb"):
            defaults["slots"] = self.slots
        if choice.name in ("fixed", "ultraep", "lrmoe"):
            defaults["capacity"] = self.capacity
        if choice.name == "ultraep":
            defaults["floor"] = self.floor
        elif choice.name == "lrmoe" and self.capacity is not None:
            defaults |= {"forward_cost": 0.0, "backward_cost": 1.0}
        elif choice.name == "fastermoe":
            # An expert of three matrices has half as much again to do as one of two.
            defaults |= {
                "dim": expert.dim,
                "ratio": 1.5 * expert.expert_dim / expert.dim,
                "flops": expert.flops,
                "bandwidth": expert.bandwidth,
                "bytes": expert.weight_bytes,
            }
        elif choice.name == "laer":
            defaults |= {
                "token_bytes": 2 * expert.dim,
                "token_ms": 1e3 * expert.row_seconds,
                "intra": expert.bandwidth,
                "inter": expert.bandwidth,
                "recompute": False,
            }
        policy = get(choice.name, **{**defaults, **choice.options})
        if (prepare := getattr(policy, "prepare", None)) is not None:
            prepare(sizes.experts, sizes.ranks)
        return policy


@dataclass(kw_only=True)
class Outcome:
    """What a policy made of a run.

    Args:
        record: a row of the table, JSON-able; see :func:`replay`.
        lines: of each planned record ``step``, ``microbatch``, ``layer``, and of each rank ``rows`` and ``kept``.
    """

    record: Record
    lines: list[Record]


def replay(choice: Choice, routing: Routing, setting: Setting, *, drop: float = 0.0) -> Outcome:
    """Plays all records to a new policy.

    Returns:
        ``record`` holds ``policy``, ``drop``, ``reason`` (why it cannot run, or None; then what follows is None):
        ``forward_mean``, ``forward_p95``, ``kept_mean``, ``kept_p95``: largest over mean rows of a rank, and of the
        rows that the backward keeps, mean and 95th percentile over the records that have any, None where none has;
        ``kept_share``; ``replicas``, mean of a record; ``bytes`` by kind, of all ranks and layers in a step; ``memory``
        by kind, of the fullest rank; ``plan_ms`` of a record and ``decide_ms`` of a step, CPU time; ``time_ms``,
        modelled, of all MoE layers in a step: ``compute``, ``tokens``, ``copies`` (around layers), ``step`` (around the
        optimizer step), ``total``, and ``hidden``, the total if copies hide behind the computing of their layer.
    """
    record: Record = {"policy": choice.label, "system": choice.name, "drop": drop, "reason": None}
    record |= dict.fromkeys(_FIELDS)
    run = None
    try:
        run = _Run(setting.make(choice), choice.name, setting, drop)
        places = zip(routing.step, routing.microbatch, routing.layer, routing.lam, strict=True)
        for step, of_step in groupby(places, key=lambda place: place[0]):
            for _, of_microbatch in groupby(of_step, key=lambda place: place[1]):
                for _, microbatch, layer, lam_GE in of_microbatch:
                    run.forward(lam_GE, step=step, microbatch=microbatch, layer=layer)
                run.end_microbatch()
            run.end_step()
    except ValueError as error:
        where = f" (first at step {step}, layer {layer})" if run is not None and run.lines else ""
        record["reason"] = f"{error}{where}"
        return Outcome(record=record, lines=[])
    return Outcome(record=record | run.result(), lines=run.lines)


_FIELDS = (
    "forward_mean",
    "forward_p95",
    "kept_mean",
    "kept_p95",
    "kept_share",
    "replicas",
    "bytes",
    "memory",
    "plan_ms",
    "decide_ms",
    "time_ms",
)


class _Run:
    """One policy on its way through the records."""

    def __init__(self, policy: Policy, name: str, setting: Setting, drop: float) -> None:
        self.policy, self.setting, self.drop = policy, setting, drop
        self.expert: Expert = setting.sizes.expert
        self.system = SYSTEMS[name](setting.sizes, policy)
        self.lines: list[Record] = []
        self.peaks = Peaks()
        self.steps = 0
        self.plan_s = self.decide_s = 0.0
        self.bytes = dict.fromkeys(KINDS, 0.0)
        self.seconds = dict.fromkeys(("compute", "tokens", "copies", "step", "exposed"), 0.0)
        self._plans: dict[int, Plan] = {}
        self._held_G = torch.zeros(setting.sizes.ranks, dtype=torch.int64, device="cpu")

    def forward(self, lam_GE: Tensor, *, step: int, microbatch: int, layer: int) -> None:
        """A forward and its backward."""
        start = time.thread_time()
        plan = self.policy.plan(lam_GE, drop=self.drop, quota=self.setting.quota, layer=layer)
        planned = time.thread_time()
        self.policy.observe(lam_GE, layer=layer)
        self.plan_s += planned - start
        self.decide_s += time.thread_time() - planned
        self._plans[layer] = plan
        held_G = torch.tensor([len(experts) for experts in plan.slots], device="cpu")
        self._held_G += held_G
        self.peaks.layer_replicas = max(self.peaks.layer_replicas, int(held_G.max()))
        phases = self.setting.price.time(plan).phases
        passes: tuple[Pass, Pass] = ("forward", "backward")
        copies_in_passes = self.system.forward(plan), self.system.backward(plan)
        for which, rows, copies in zip(passes, token_transfers(plan, self.expert), copies_in_passes, strict=True):
            self._count(rows)
            own = [phase for phase in phases if phase.of == which]
            compute = sum(phase.seconds for phase in own if phase.kind == "compute")
            travelling = sum(p.seconds for p in own if p.kind == "network" and p.name not in TRAFFIC)
            copying = self._send(copies)
            if type(self.system) is SharedSlots:
                # The engine's own traffic, of which a layer's phases know between which ranks it goes.
                copying = sum(phase.seconds for phase in own if phase.name in TRAFFIC)
            self.seconds["compute"] += compute
            self.seconds["tokens"] += travelling
            self.seconds["copies"] += copying
            self.seconds["exposed"] += max(copying - compute, 0.0)
        rows_G, kept_G = plan.rows_EG.sum(0), plan.quota_EG.sum(0)
        line = {"step": step, "microbatch": microbatch, "layer": layer, "replicas": plan.num_replicas}
        self.lines.append({**line, "rows": rows_G.tolist(), "kept": kept_G.tolist()})

    def end_microbatch(self) -> None:
        """All its layers have run."""
        self.peaks.replicas = max(self.peaks.replicas, int(self._held_G.max()))
        self._held_G.zero_()

    def end_step(self) -> None:
        """The optimizer's step."""
        start = time.thread_time()
        self.policy.step()
        self.decide_s += time.thread_time() - start
        moved: list[Move] = self.policy.moves() if isinstance(self.policy, HistoryPolicy) else []
        self.seconds["step"] += self._send(self.system.step(self._plans, moved))
        travels = [(move.layer, move.target_rank) for move in moved if move.source_rank != move.target_rank]
        most = max((travels.count(place) for place in set(travels)), default=0)
        self.peaks.incoming = max(self.peaks.incoming, most)
        self._plans = {}
        self.steps += 1

    def result(self) -> Record:
        """See :func:`replay`."""
        ratios = [(max_over_mean(line["rows"]), max_over_mean(line["kept"])) for line in self.lines]
        forward = [ratio for ratio, _ in ratios if ratio is not None]
        kept = [ratio for _, ratio in ratios if ratio is not None]
        rows, kept_rows = (sum(sum(line[name]) for line in self.lines) for name in ("rows", "kept"))
        held = self.system.memory(self.peaks)
        time_ms = {name: 1e3 * seconds / self.steps for name, seconds in self.seconds.items()}
        exposed = time_ms.pop("exposed")
        time_ms["total"] = sum(time_ms.values())
        time_ms["hidden"] = time_ms["total"] - time_ms["copies"] + exposed
        return {
            "forward_mean": mean_of_known(forward),
            "forward_p95": p95(forward) if forward else None,
            "kept_mean": mean_of_known(kept),
            "kept_p95": p95(kept) if kept else None,
            "kept_share": kept_rows / rows if rows else 1.0,
            "replicas": mean([line["replicas"] for line in self.lines]),
            "bytes": {kind: total / self.steps for kind, total in self.bytes.items()},
            "memory": {**asdict(held), "total": held.total},
            "plan_ms": 1e3 * self.plan_s / len(self.lines),
            "decide_ms": 1e3 * self.decide_s / self.steps,
            "time_ms": time_ms,
        }

    def _count(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self.bytes[transfer.kind] += transfer.total

    def _send(self, transfers: Sequence[Transfer]) -> float:
        """Counts the bytes; the transfers go one after another, each after the latency of a collective."""
        self._count(transfers)
        latency = self.setting.price.hardware.latency_s
        return sum(one.seconds(self.expert.bandwidth) + latency for one in transfers if one.total)


def compare(
    choices: Sequence[Choice],
    routing: Routing,
    setting: Setting,
    *,
    drop: float = 0.2,
    progress: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Every policy without a drop, and, if ``drop`` is above 0, with it. The first must be fixed ownership.

    Each record gets ``against_fixed``, its modelled time over fixed ownership's under the same drop, and ``verdict``,
    in words where it does worse.
    """
    outcomes = []
    for rate in (0.0, drop) if drop else (0.0,):
        fixed: Record | None = None
        for choice in choices:
            if progress is not None:
                progress(f"{choice.label}, {rate:.0%}")
            outcome = replay(choice, routing, setting, drop=rate)
            fixed = fixed if fixed is not None else outcome.record
            outcome.record |= verdict(outcome.record, fixed)
            outcomes.append(outcome)
    return outcomes


def verdict(record: Record, fixed: Record) -> Record:
    """``against_fixed`` and ``verdict`` of a record, see :func:`compare`; None and "" where it is not worse."""
    if record["reason"] is not None:
        return {"against_fixed": None, "verdict": "cannot run"}
    if fixed["reason"] is not None:
        return {"against_fixed": None, "verdict": ""}
    mine, base = record["time_ms"], fixed["time_ms"]
    worse = []
    if mine["total"] > 1.0005 * base["total"]:
        hidden = "; faster if its copies hide" if mine["hidden"] < base["hidden"] else ""
        worse.append(f"slower than fixed{hidden}")
    if record["forward_mean"] is not None and record["forward_mean"] > 1.0005 * fixed["forward_mean"]:
        worse.append("less even than fixed")
    ratio = mine["total"] / base["total"] if base["total"] else 1.0
    return {"against_fixed": ratio, "verdict": ", ".join(worse)}
