"""What of a model fits on given hardware, under which policy, slots, drop and save mode, and what that costs in time.

Rows come from the planners, on recorded or synthetic loads; memory and time from :mod:`lrmoe.cluster`. Nothing is run.

Shapes: E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, get_args

from lrmoe.balance import Plan, get
from lrmoe.cluster import Elementwise, Hardware, Memory, ModelShape, Precision, memory
from lrmoe.config import Quota, Save
from lrmoe.evenness import max_over_mean, mean_of_known
from lrmoe.studies.loads import mean
from lrmoe.studies.paper_config import FASTER
from lrmoe.studies.price import Contender, Price, break_even, pays
from lrmoe.studies.replay import Record
from lrmoe.studies.routing import Routing

STEP = 0.01
"""Drops are tried in these steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster, with its loads.

    Args:
        model, hardware: dimensions and rates.
        ranks: G.
        tokens: of a rank in one microbatch.
        routing: loads, scaled to ``tokens``.
        budget: bytes of a rank.
        max_drop: the largest drop that is acceptable.
        quota: how it is spread.
        slots: replicas that a rank may hold at most.
        floor: of UltraEP's replicas, in rows.
        elementwise: how the activations between the projections run.
        memory: what :func:`lrmoe.cluster.memory` is given besides: shards, recompute, the dense part.
    """

    model: ModelShape
    hardware: Hardware
    ranks: int
    tokens: int
    routing: Routing
    budget: float
    max_drop: float = 0.2
    quota: Quota = "expert"
    slots: int = 2
    floor: int = 1024
    elementwise: Elementwise = "plain"
    precision: Precision = field(default_factory=Precision)
    memory: dict[str, Any] = field(default_factory=dict)

    def price(self, save: Save) -> Price:
        """What a layer's time is worked out with."""
        return Price(
            model=self.model,
            hardware=self.hardware,
            save=save,
            elementwise=self.elementwise,
            precision=self.precision,
            recompute=bool(self.memory.get("recompute")),
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """A policy with so many slots."""

    policy: str
    slots: int

    @property
    def label(self) -> str:
        return self.policy if self.policy == "fixed" else f"{self.policy}, {self.slots} slot{'s' * (self.slots > 1)}"


class Planner:
    """Plans of a case, each made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._plans: dict[tuple[str, int, float], list[Plan]] = {}
        self._seconds: dict[tuple[str, int, float, Save], tuple[float, float]] = {}
        self._crossover: dict[tuple[str, int], dict[Save, float | None]] = {}

    @property
    def options(self) -> list[Option]:
        """Fixed ownership, and both exact and dropping policies with replicas."""
        slots = range(1, self.case.slots + 1)
        return [Option(policy="fixed", slots=0)] + [
            Option(policy=name, slots=count) for name in ("ultraep", "lrmoe") for count in slots
        ]

    def plans(self, option: Option, drop: float) -> list[Plan]:
        """One a record."""
        key = option.policy, option.slots, drop
        if key not in self._plans:
            case, policy = self.case, self._policy(option)
            self._plans[key] = [policy.plan(lam_GE, drop=drop, quota=case.quota) for lam_GE in case.routing.lam]
        return self._plans[key]

    def memory(self, option: Option, drop: float, save: Save) -> Memory:
        """Of the fullest rank in the worst microbatch."""
        case = self.case
        found: list[Memory] = []
        for by_layer in self._microbatches(self.plans(option, drop)):
            layers = [by_layer[layer % len(by_layer)] for layer in range(case.model.moe_layers)]
            rows_LG = [plan.rows_EG.sum(0).tolist() for plan in by_layer]
            kept_LG = [plan.quota_EG.sum(0).tolist() for plan in by_layer]
            for rank in range(case.ranks):
                found.append(
                    memory(
                        case.model,
                        ranks=case.ranks,
                        tokens=max(int(layers[0].lam_GE[rank].sum()) // case.model.top_k, 0),
                        rows=[rows_LG[layer % len(by_layer)][rank] for layer in range(len(layers))],
                        kept=[kept_LG[layer % len(by_layer)][rank] for layer in range(len(layers))],
                        save=save,
                        slots=option.slots,
                        precision=case.precision,
                        elementwise=case.elementwise,
                        **case.memory,
                    )
                )
        return max(found, key=lambda one: one.total)

    def seconds(self, option: Option, drop: float, save: Save) -> tuple[float, float]:
        """Of all MoE layers in a microbatch, forward and backward: modelled, and if every phase took its mean rank's
        time. With recomputation the forward counts twice."""
        key = option.policy, option.slots, drop, save
        if key not in self._seconds:
            price, layers = self.case.price(save), self.case.model.moe_layers
            times = [price.time(plan) for plan in self.plans(option, drop)]
            whole, even = mean([one.seconds for one in times]), mean([one.balanced for one in times])
            self._seconds[key] = layers * whole, layers * even
        return self._seconds[key]

    def pays(self, option: Option, save: Save) -> bool:
        """Whether the option's replicas are worth their time at this case's tokens, nothing dropped."""
        home, _ = self.seconds(Option(policy="fixed", slots=0), 0.0, save)
        planned, _ = self.seconds(option, 0.0, save)
        return pays(home, planned, mean([plan.num_replicas for plan in self.plans(option, 0.0)]))

    def least_drop(self, option: Option, save: Save) -> float | None:
        """The least drop in steps of :data:`STEP` at which every rank fits; None if not even the largest does."""
        if self._fits(option, 0.0, save):
            return 0.0
        steps = round(self.case.max_drop / STEP)
        if steps < 1 or not self._fits(option, self._drop(steps), save):
            return None
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(option, self._drop(middle), save) else (middle, high)
        return self._drop(high)

    def crossover(self, option: Option, save: Save) -> float | None:
        """Tokens a rank from which on the replicas pay, as ``lrmoe balance`` says; None if they never do."""
        key = option.policy, option.slots
        if key not in self._crossover:
            case = self.case
            contender = Contender(label=option.label, policy=self._policy(option))
            modes: tuple[Save, ...] = get_args(Save)
            found = break_even(contender, case.routing.lam, prices=[case.price(mode) for mode in modes], at=case.tokens)
            self._crossover[key] = {mode: one["tokens"] for mode, one in zip(modes, found, strict=True)}
        return self._crossover[key][save]

    def _drop(self, steps: int) -> float:
        return min(round(steps * STEP, 10), self.case.max_drop)

    def _fits(self, option: Option, drop: float, save: Save) -> bool:
        return self.memory(option, drop, save).total <= self.case.budget

    def _policy(self, option: Option) -> Any:
        if option.policy == "fixed":
            return get("fixed")
        more = {"floor": self.case.floor} if option.policy == "ultraep" else {}
        return get(option.policy, slots=option.slots, **more)

    def _microbatches(self, plans: Sequence[Plan]) -> list[list[Plan]]:
        """The plans of each microbatch's layers. Synthetic draws, and matrices of a file, are taken one by one: each
        as if all layers had its loads."""
        routing = self.case.routing
        if routing.synthetic or not routing.about:
            return [[plan] for plan in plans]
        places = zip(routing.step, routing.microbatch, plans, strict=True)
        return [[plan for *_, plan in group] for _, group in groupby(places, key=lambda place: place[:2])]


def study(case: Case, progress: Callable[[str], None] | None = None) -> list[Record]:
    """A record an option and save mode.

    Returns:
        Records with ``policy``, ``slots``, ``label``, ``save``, ``exact_bytes`` (fullest rank, nothing dropped),
        ``fits_exactly``, ``drop`` (the least that fits, None if none does), ``bytes`` (at that drop, else at the
        largest), ``seconds`` (of all MoE layers in a microbatch, at that drop), ``over_fixed`` (over fixed ownership's
        without a drop), ``over_even`` (over perfectly even ranks without replicas or a drop), ``at_most_drop`` (the
        same two and ``bytes`` at the largest drop), ``crossover`` and ``pays`` (see :class:`Planner`),
        ``busiest`` (largest over mean rows of a rank in the forward) and ``replicas`` of a record at the drop.
    """
    planner = Planner(case)
    fixed, even = planner.seconds(Option(policy="fixed", slots=0), 0.0, "preactivation")
    records: list[Record] = []
    for option in planner.options:
        if progress is not None:
            progress(option.label)
        for save in get_args(Save):
            drop = planner.least_drop(option, save)
            shown = case.max_drop if drop is None else drop
            seconds, _ = planner.seconds(option, shown, save)
            most, _ = planner.seconds(option, case.max_drop, save)
            plans = planner.plans(option, shown)
            exact = planner.memory(option, 0.0, save).total
            records.append(
                {
                    "policy": option.policy,
                    "slots": option.slots,
                    "label": option.label,
                    "save": save,
                    "exact_bytes": exact,
                    "fits_exactly": exact <= case.budget,
                    "drop": drop,
                    "bytes": planner.memory(option, shown, save).total,
                    "seconds": seconds,
                    "over_fixed": seconds / fixed,
                    "over_even": seconds / even,
                    "at_most_drop": {
                        "drop": case.max_drop,
                        "over_fixed": most / fixed,
                        "bytes": planner.memory(option, case.max_drop, save).total,
                    },
                    "crossover": planner.crossover(option, save) if option.slots else 0.0,
                    "pays": bool(option.slots) and planner.pays(option, save),
                    "busiest": mean_of_known([max_over_mean(plan.rows_EG.sum(0).tolist()) for plan in plans]),
                    "replicas": mean([plan.num_replicas for plan in plans]),
                }
            )
    return records


def recommend(records: Sequence[Record], case: Case) -> tuple[Record | None, str]:
    """The setting to use, None if none fits, and one sentence that says it with its reason.

    Nothing is dropped unless nothing fits without. Replicas are recommended for time only where they pay, which is what
    ``lrmoe balance`` says of the same loads, model and hardware: see :mod:`lrmoe.studies.price`.
    """
    budget = f"{case.budget / 2**30:.4g} GiB"
    exact = [one for one in records if one["fits_exactly"]]
    at_home = min((one for one in exact if one["policy"] == "fixed"), key=_time, default=None)
    paying = min((one for one in exact if one["slots"] and one["pays"]), key=_time, default=None)
    if at_home is not None and (paying is None or paying["seconds"] > FASTER * at_home["seconds"]):
        return at_home, (
            f"Leave it off: fixed ownership with save={at_home['save']} and no drop fits in {budget} "
            f"({_gib(at_home['bytes'])} on the fullest rank), and {_why_at_home(records, case, at_home)}."
        )
    if paying is not None:
        but = "" if at_home is not None else "; fixed ownership does not fit"
        return paying, (
            f"Use {paying['label']}, save={paying['save']} and no drop: it fits in {budget} "
            f"({_gib(paying['bytes'])}) and takes {paying['over_fixed']:.2f} of fixed ownership's MoE time{but}."
        )
    if exact:
        best = min(exact, key=lambda one: (one["slots"], _time(one)))
        return best, (
            f"Use {best['label']}, save={best['save']} and no drop, for memory and not for time: fixed ownership does "
            f"not fit in {budget}, this does ({_gib(best['bytes'])}), at {best['over_fixed']:.2f} of its MoE time."
        )
    dropping = [one for one in records if one["drop"] is not None]
    if dropping:
        best = min(dropping, key=lambda one: (one["drop"], _time(one)))
        least = min(records, key=lambda one: float(one["exact_bytes"]))
        return best, (
            f"Drop {best['drop']:.0%} of the backward's pairs with {best['label']} and save={best['save']}: nothing "
            f"fits in {budget} without a drop (least: {_gib(least['exact_bytes'])}, {least['label']}, "
            f"save={least['save']}), and this is the least drop that does ({_gib(best['bytes'])}, "
            f"{best['over_fixed']:.2f} of fixed ownership's MoE time)."
        )
    least = min(records, key=lambda one: float(one["bytes"]))
    return None, (
        f"Nothing fits in {budget}: the least is {_gib(least['bytes'])} ({least['label']}, save={least['save']}, "
        f"{case.max_drop:.0%} dropped); use a smaller microbatch, more ranks, recomputation or sharded states."
    )


def _why_at_home(records: Sequence[Record], case: Case, at_home: Record) -> str:
    """Why no replicas are recommended where fixed ownership fits."""
    if case.ranks == 1:
        return "on one rank there is nothing to balance"
    having = [one for one in records if one["slots"]]
    if not having:
        return "no slots are asked about"
    crossovers = [one["crossover"] for one in having if one["crossover"] is not None]
    if crossovers and case.tokens < min(crossovers):
        return f"replicas pay from about {min(crossovers):,.0f} tokens a rank on and there are {case.tokens:,}"
    if not any(one["replicas"] for one in having):
        return "no replica is planned for these loads"
    if not any(one["fits_exactly"] for one in having):
        return "no setting with replicas does"
    best = min((one for one in having if one["fits_exactly"]), key=_time)
    return (
        f"the best replicas ({best['label']}) would bring the MoE time to {best['seconds'] / _time(at_home):.3f} of it"
    )


def _time(record: Record) -> float:
    return float(record["seconds"])


def _gib(number: float) -> str:
    return f"{number / 2**30:.4g} GiB"
