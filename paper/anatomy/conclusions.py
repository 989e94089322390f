"""What the anatomy study's tables say, in sentences: every number and every word of comparison is read off rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.config import LRMoEConfig

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]


def conclude(tables: Tables, *, rate: float, batches: int, seeds: int) -> tuple[list[str], list[str]]:
    """Conclusions and advice.

    Args:
        tables: rows of ``pairs``, ``errors`` and ``router``, as :mod:`paper.anatomy.tables` makes them.
        rate: the share of pairs that ``pairs`` and ``errors`` are about.
        batches: that a mean is over.
        seeds: that a row is a mean over.
    """
    conclusions: list[str] = []
    advice: list[str] = []
    places = list(dict.fromkeys(row["title"] for row in tables["errors"]))
    for place in places:
        pairs, errors = _last(tables["pairs"], place), _last(tables["errors"], place)
        conclusions += [*_what_is_dropped(place, pairs, rate), *_averaging(place, errors, rate, batches)]
        advice += _which_selector(place, errors, rate, batches, seeds)
    conclusions += _between(places, tables, rate, batches)
    conclusions += _prediction(tables["pairs"])
    for place in places:
        told, advised = _router(place, tables["router"], seeds)
        conclusions += told
        advice += advised
    advice += _guard(tables["pairs"], rate)
    return conclusions, advice


def _last(rows: Sequence[Row], place: str) -> dict[str, Row]:
    """The rows of a regime's last step, by variant."""
    of_place = [row for row in rows if row["title"] == place]
    step = max((row["step"] for row in of_place), default=0)
    return {row["variant"]: row for row in of_place if row["step"] == step}


def _what_is_dropped(place: str, rows: Mapping[str, Row], rate: float) -> list[str]:
    top, random = rows.get("topq"), rows.get("random")
    if top is None or top["coherence"] is None:
        return []
    other = "" if random is None else f" (random pairs: {random['tail']:.1%} and {random['coherence']:.1f})"
    return [
        f"{place}, step {top['step']} (loss {top['loss']:.2f}): the {rate:.0%} of pairs that topq leaves out hold "
        f"{top['tail']:.2%} of ΣR, with a coherence of {top['coherence']:.1f}{other}; in a layer that drops alone the "
        f"squared error of the gradient is {_number(top['alone'])} of its square."
    ]


def _averaging(place: str, rows: Mapping[str, Row], rate: float, batches: int) -> list[str]:
    told = []
    for name in ("topq", "pps", "random"):
        row = rows.get(name)
        if row is not None and row["systematic"] is not None:
            told.append(
                f"{name} {_number(row['one'])} and {_number(row['mean'])} ({max(0.0, row['systematic']):.0%} in common)"
            )
    if not told:
        return []
    sentences = [
        f"{place}, {rate:.0%}: squared error of the experts' gradients in one batch and in the mean of {batches}, and "
        f"the share of it that all batches have in common: {'; '.join(told)}."
    ]
    top = rows.get("topq")
    if top is not None and top["crossing"] is not None:
        sentences.append(
            f"{place}: averaged over {top['crossing']:.0f} batches, topq's bias is as large as what is left of the "
            f"noise between batches; over more of them it is the larger of the two."
        )
    return sentences


def _which_selector(place: str, rows: Mapping[str, Row], rate: float, batches: int, seeds: int) -> list[str]:
    top, pps = rows.get("topq"), rows.get("pps")
    if top is None or pps is None:
        return []
    if pps["mean_high"] < top["mean_low"]:
        better, worse = pps, top
    elif top["mean_high"] < pps["mean_low"]:
        better, worse = top, pps
    else:
        return [
            f"{place}: the errors of topq and pps at {rate:.0%} overlap over the seeds; the gradient gives no reason "
            "to prefer one."
        ]
    times = f"averaged over {batches} batches its squared error is {worse['mean'] / better['mean']:.1f} times smaller"
    if seeds == 1:
        return [
            f"{place}: at {rate:.0%} run more seeds before you prefer {better['variant']} to {worse['variant']}: "
            f"{times} for the one seed measured."
        ]
    return [
        f"{place}: at {rate:.0%} prefer {better['variant']} to {worse['variant']}; {times}, and smaller for every seed."
    ]


def _between(places: Sequence[str], tables: Tables, rate: float, batches: int) -> list[str]:
    """How the regimes differ in what topq loses."""
    found = [(place, row) for place in places if (row := _last(tables["errors"], place).get("topq")) is not None]
    if len(found) < 2:
        return []
    (low_place, low), *_, (high_place, high) = sorted(found, key=lambda one: one[1]["mean"])
    if not low["mean"]:
        return []
    sentence = (
        f"topq at {rate:.0%}, mean of {batches} batches: the squared error is {high['mean'] / low['mean']:.1f} times "
        f"as large in the regime “{high_place.lower()}” as in “{low_place.lower()}”"
    )
    a, b = (_last(tables["pairs"], place).get("topq") for place in (high_place, low_place))
    if a is None or b is None or not all(row[key] for row in (a, b) for key in ("tail", "coherence", "alignment")):
        return [f"{sentence}."]
    factors = {
        "dropped share of ΣR": a["tail"] / b["tail"],
        "coherence": a["coherence"] / b["coherence"],
        "ΣR/‖S‖²": a["alignment"] / b["alignment"],
    }
    told = ", ".join(f"{name} {factor:.2g} times" for name, factor in factors.items())
    largest = max(factors, key=lambda name: factors[name])
    return [f"{sentence}. Of the three factors of a layer's own error ({told}) the {largest} differs most upwards."]


def _prediction(rows: Sequence[Row]) -> list[str]:
    """Whether V* says what the sampled gradient shows."""
    ratios = [
        row["alone_variance"] / row["variance"]
        for row in rows
        if row["variant"] == "pps" and row["variance"] and row["alone_variance"] is not None
    ]
    if not ratios:
        return []
    return [
        f"The squared error that pps shows in a layer is {min(ratios):.2f} to {max(ratios):.2f} times what V* predicts "
        f"from scalars alone ({len(ratios)} probes, means over batches, layers and seeds)."
    ]


def _router(place: str, rows: Sequence[Row], seeds: int) -> tuple[list[str], list[str]]:
    of_place = [row for row in rows if row["title"] == place]
    step = max((row["step"] for row in of_place), default=0)
    groups: dict[tuple[str, float], dict[str, Row]] = {}
    for row in of_place:
        if row["step"] == step:
            groups.setdefault((row["variant"], row["rate"]), {})[row["router_grad"]] = row
    told, advice = [], []
    for (variant, rate), kinds in groups.items():
        base, kept = kinds.get("sum_rule"), kinds.get("kept")
        if base is None or kept is None or not base["one"]:
            continue
        exact = kinds.get("exact")
        other = "" if exact is None else f", with exact {_number(exact['one'])}"
        told.append(
            f"{place}, {variant} at {rate:.0%}: the squared error of the router's gradient is "
            f"{_number(base['one'])} of its square with sum_rule{other}, with kept {_number(kept['one'])}, "
            f"{kept['one'] / base['one']:.1f} times that of sum_rule."
        )
        if variant == "pps":
            where = f"{place}: for the router's gradient of pps at {rate:.0%}"
            # Of one seed lowest and highest are the same, so that everything would be told apart.
            advice += (
                _which_router_grad(where, base, exact, kept) if seeds > 1 else [f"{where} one seed tells no two apart."]
            )
    return told, advice


def _which_router_grad(where: str, base: Row, exact: Row | None, kept: Row) -> list[str]:
    if kept["one_high"] < base["one_low"]:
        return [f"{where} take kept rather than sum_rule; its squared error is smaller for every seed."]
    advice = where
    if kept["one_low"] > base["one_high"]:
        advice += " do not take kept;"
    if base["crossing"] is None:
        return [f"{advice} take sum_rule, whose error leaves nothing in common to all batches."]
    advice += (
        f" take sum_rule, whose bias is as large as the noise that is left once {base['crossing']:.0f} batches are "
        "averaged"
    )
    if exact is None or not exact["one"] or exact["one_high"] >= base["one_low"]:
        return [f"{advice}."]
    gain = base["one"] / exact["one"]
    return [
        f"{advice}, or exact, which computes one more product for dropped pairs and has {gain:.0f} times less squared "
        "error."
    ]


def _guard(rows: Sequence[Row], rate: float) -> list[str]:
    """Where the guard's default limits lie beside what was measured."""
    limits = LRMoEConfig()
    found = []
    for variant, key, limit, name in (
        ("pps", "variance", limits.guard_variance, "V*/ΣR"),
        ("topq", "tail", limits.guard_tail, "the dropped share of ΣR"),
    ):
        measured = [row for row in rows if row["variant"] == variant and row[key] is not None]
        if not measured or limit is None:
            continue
        above = [row for row in measured if row[key] > limit]
        worst = max(measured, key=lambda row: row[key])
        if not above:
            found.append(
                f"The guard's default limit for {variant} ({name} {limit:g}) is above everything measured at "
                f"{rate:.0%} (at most {_number(worst[key])}): leave it on."
            )
        else:
            found.append(
                f"Expect the guard's default limit for {variant} ({name} {limit:g}) to stop drops of {rate:.0%} in "
                f"{len(above)} of {len(measured)} probes; the highest, of all layers together, is "
                f"{_number(worst[key])} ({worst['title'].lower()}, step {worst['step']})."
            )
    return found


def _number(value: float) -> str:
    """Three significant digits, without an exponent where it can be read."""
    return f"{value:.3g}"
