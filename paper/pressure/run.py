"""``python -m paper pressure``: what it works out and the files it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import lrmoe
from lrmoe.cluster import Hardware, ModelShape, model
from lrmoe.studies.expert import Expert
from lrmoe.studies.paper_loads import routing_for
from lrmoe.studies.replay import Choice, Record, Setting, parse_choices
from lrmoe.studies.routing import Routing
from lrmoe.studies.systems import Sizes
from lrmoe.training.files import check_free, clear_run, locked, write_json, write_records
from paper import PROGRAM
from paper.pressure.completes import Limits, under_pressure
from paper.pressure.config import PressureConfig
from paper.pressure.pair_bytes import Accounting, PairBytes, accounting
from paper.pressure.published import THROUGHPUT, TOKENS, Assumed, at_one, coherence, in_order, needed
from paper.pressure.tables import ACCOUNTINGS, counting

SKEWS = (1.0, 1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0)
"""At which the order of the systems is looked at."""
COMPARED = (1.5, 2.0, 2.5, 3.0)
"""Skews of the comparison with the paper's memory and time."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A config with what it names."""

    config: PressureConfig
    model: ModelShape
    hardware: Hardware
    routing: Routing
    choices: list[Choice]

    @classmethod
    def of(cls, config: PressureConfig) -> Study:
        """Reads the files.

        Raises:
            ValueError: if the model, the hardware, the loads or a policy cannot be used.
        """
        shape, machine = config.shape(), config.machine()
        routing = config.routing(shape)
        choices = parse_choices(config.policies)
        return cls(config=config, model=shape, hardware=machine, routing=routing, choices=choices)

    @property
    def budget(self) -> float:
        """Bytes."""
        return self.config.budget(self.hardware)

    @cached_property
    def setting(self) -> Setting:
        """What the policies share. A layer's slots are of this layer, whoever shares them."""
        rate = self.hardware
        expert = Expert(
            dim=self.model.dim,
            expert_dim=self.model.expert_dim,
            flops=rate.flops * rate.gemm_efficiency,
            bandwidth=rate.intra_bytes_per_s * rate.link_efficiency,
        )
        sizes = Sizes(experts=self.model.num_experts, ranks=self.config.ep, layers=1, expert=expert)
        return Setting(sizes=sizes, slots=self.config.slots, floor=self.config.floor)

    def pair(self, which: Accounting) -> PairBytes:
        """Bytes of rows."""
        return accounting(which, self.model, save=self.config.save, elementwise=self.config.elementwise)

    def play(
        self,
        which: Accounting,
        routing: Routing,
        pressures: Sequence[float],
        choices: Sequence[Choice] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> list[Record]:
        """Records of :func:`paper.pressure.completes.under_pressure`."""
        return under_pressure(
            self.choices if choices is None else choices,
            routing,
            self.setting,
            Limits(budget=self.budget, pair=self.pair(which), min_keep=self.config.min_keep),
            tokens=self.config.tokens,
            top_k=self.model.top_k,
            pressures=pressures,
            progress=progress,
        ).records

    def order(self, progress: Callable[[str], None] | None = None) -> list[Record]:
        """For each skew and way of counting the four systems' shares at pressure ``at``, best first as published.

        ``completes`` and ``batch`` by policy, ``as_published`` for both: each system above the next by 0.001 at least;
        ``reason`` where these sizes cannot be that skewed.
        """
        config = self.config
        choices = [Choice(name=name) for name in THROUGHPUT]
        found: list[Record] = []
        for skew in SKEWS:
            try:
                routing = routing_for(
                    self.model,
                    ranks=config.ep,
                    tokens=config.tokens,
                    skew=skew,
                    seed=config.seed,
                    draws=config.draws,
                )
            except ValueError as error:
                found += [{"accounting": which, "skew": skew, "reason": str(error)} for which in ACCOUNTINGS]
                continue
            for which in ACCOUNTINGS:
                if progress is not None:
                    progress(f"skew {skew:g}")
                records = self.play(which, routing, [config.at], choices)
                record: Record = {"accounting": which, "skew": skew, "reason": None, "as_published": {}}
                for name in ("completes", "batch"):
                    record[name] = {one["policy"]: one[name] for one in records}
                    record["as_published"][name] = in_order([record[name][policy] for policy in THROUGHPUT])
                record["backward"] = {one["policy"]: one["backward"] for one in records}
                found.append(record)
        return found


def pressure(
    config: PressureConfig,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Record:
    """What completes under each policy as the batch grows, the order of the systems for other skews, and the paper's
    figures beside ours. With ``out`` writes ``metrics.jsonl`` (a line a way of counting, policy and pressure),
    ``summary.json`` and ``config.json`` there.

    Raises:
        ValueError: if a setting, a file or the loads are wrong, or ``out`` is not free; nothing is written then.
    """
    if out is not None:
        check_free(out, overwrite=overwrite, command="pressure", program=PROGRAM)
    study = Study.of(config)
    lines: list[Record] = []
    for which in ACCOUNTINGS:
        records = study.play(which, study.routing, config.levels, progress=progress)
        lines += [{"accounting": which, **record} for record in records]
    order = study.order(progress)
    # The published figures are of this model on eight ranks; beside another setting's they would say nothing.
    applies = config.model == "qwen3-30b-a3b" and config.ep == 8
    assumed = Assumed(model=model("qwen3-30b-a3b"), hardware=study.hardware, tokens=config.tokens, slots=config.slots)
    summary: Record = {
        "source": study.routing.source,
        "synthetic": study.routing.synthetic,
        "produced": study.routing.produced(),
        "model": asdict(study.model),
        "hardware": asdict(study.hardware),
        "budget": study.budget,
        "tokens": config.tokens,
        "held": max((line["held"] for line in lines if line["reason"] is None), default=None),
        "counted": {which: study.pair(which).describes for which in ACCOUNTINGS},
        "order": order,
        "published": {
            "drop": assumed.drop,
            "slots": assumed.slots,
            "rows": [at_one(skew, assumed) for skew in COMPARED] if applies else [],
            "needed": needed(replace(assumed, tokens=TOKENS)),
            "coherence": coherence(assumed.model),
        },
    }
    summary["notes"] = notes(lines, order, config)
    summary["policies"] = lines
    if out is not None:
        _write(out, config, summary)
    return summary


def notes(lines: Sequence[Record], order: Sequence[Record], config: PressureConfig) -> list[str]:
    """What a reader should know before the numbers."""
    said = list(dict.fromkeys(f"{line['policy']} cannot run: {line['reason']}" for line in lines if line["reason"]))
    for which in ACCOUNTINGS:
        for policy in dict.fromkeys(line["policy"] for line in lines):
            own = [one for one in lines if (one["accounting"], one["policy"]) == (which, policy) and not one["reason"]]
            whole = [one["pressure"] for one in own if one["completes"] > 1 - 1e-9]
            if own:
                upto = f"everything completes up to {max(whole):g} x" if whole else "not everything completes anywhere"
                said.append(f"{counting(which)}: under {policy} {upto}")
        for name in ("completes", "batch"):
            ran = [one for one in order if one["accounting"] == which and one["reason"] is None]
            right = [f"{one['skew']:g}" for one in ran if one["as_published"][name]]
            wrong = [f"{one['skew']:g}" for one in ran if not one["as_published"][name]]
            said.append(
                f"{counting(which)}: order at {config.at:g} x by {name} as published (lrmoe > ultraep > symi > fixed) "
                f"at skews {', '.join(right) or 'none'}; not at {', '.join(wrong) or 'none'}"
            )
    return said


def _write(out: Path, config: PressureConfig, summary: Record) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        clear_run(out)
        write_records(out / "metrics.jsonl", [{"step": i, **line} for i, line in enumerate(summary["policies"])])
        write_json(out / "summary.json", summary)
        write_json(out / "config.json", {"command": "pressure", "version": lrmoe.__version__, **asdict(config)})
