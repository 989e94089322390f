"""What a user should do about a training run: sentences that follow from its numbers, and from nothing else.

Each rule is a function of the evidence that says something or nothing. A rule names the numbers it stands on, and the
setting that answers them; where no setting is known to, it says what to look at. Plain text throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lrmoe.report.evidence import Evidence
from lrmoe.report.text import counted, fixed, percent, whole

# A loss that fell by more than this share between the last two validations is called falling, and one that rose by more
# since its lowest is called rising.
MOVING = 0.01
# An expert's or a rank's largest load over the mean from which on it is worth a word.
UNEVEN_EXPERTS, UNEVEN_RANKS, EVEN_RANKS = 2.0, 1.1, 1.05
# Of a step, below which the experts' backward is too little for a drop to be felt.
SMALL_SHARE = 0.2
_NAMED = 4


def advise(evidence: Evidence) -> list[str]:
    """The sentences, most urgent first; never none."""
    found = [sentence for rule in RULES for sentence in rule(evidence)]
    return found or ["Nothing in these records calls for a change."]


def not_finite(e: Evidence) -> list[str]:
    if e.not_finite is None:
        return []
    then = (
        "Train again with drop=0 and the same seed to see whether dropping has to do with it."
        if e.drop > 0
        else "Nothing was dropped, so look at the learning rate and the data."
    )
    return [f"Do not use this run: a loss was not a finite number at step {whole(e.not_finite)}. {then}"]


def nothing_dropped(e: Evidence) -> list[str]:
    if e.drop > 0 or e.kept_share is None or e.kept_share < 1:
        return []
    return [
        "Nothing was dropped here. Keep this run as the yardstick: train again with a drop and the same seed, and "
        "compare validation losses."
    ]


def cost(e: Evidence) -> list[str]:
    """What dropping cost the layers, against the guard's limit."""
    if e.drop == 0 or e.worst is None:
        return []
    tail = e.limit.column == "kept_importance_share"
    what = "The dropped share of ΣR" if tail else "V*/ΣR"

    def show(value: float) -> str:
        return percent(value, 2) if tail else fixed(value, 3)

    limit = f"{show(e.limit.value)} ({e.limit.field}" + (")" if e.limit.in_force else ", the default: no guard was on)")
    if not e.excess:
        step, layer, value = e.worst
        return [
            f"Keep the drop as it is: {_small(what)} never was above {limit} at a logged step, at most {show(value)} "
            f"({layer}, step {whole(step)}). Whether the loss agrees only a run with drop=0 and the same seed tells."
        ]
    first = min(one.first_step for one in e.excess)
    last = max(one.last_step for one in e.excess)
    worst = max(e.excess, key=lambda one: one.worst)
    said = (
        f"{what} was above {limit} in {_layers([one.layer for one in e.excess], e.layers)} between steps "
        f"{whole(first)} and {whole(last)}, at most {show(worst.worst)} ({worst.layer}, step "
        f"{whole(worst.worst_step)})."
        if first != last
        else f"{what} was above {limit} in {_layers([one.layer for one in e.excess], e.layers)} at step "
        f"{whole(first)}, at most {show(worst.worst)}."
    )
    if tail:
        return [
            f'Set selector="pps": {_small(said)} topq leaves the same kind of pairs out at every step, so this adds up.'
        ]
    if last <= e.last_cost_step // 2:
        return [
            f"Set warmup_steps={last}: {_small(said)} After that it stayed below, so only the start needs every pair."
        ]
    late = [one for one in e.excess if one.last > e.limit.value]
    if not late:
        return [
            f"Set error_budget={e.limit.value:g}, which keeps as many pairs as that takes where and while it is "
            f"needed, or lower the drop from {percent(e.drop, 0)}: {_small(said)}"
        ]
    return [
        f"Lower the drop from {percent(e.drop, 0)}, or set error_budget={e.limit.value:g}, which keeps as many pairs "
        f"as that takes: {_small(said)} It still was above when last measured in "
        f"{_layers([one.layer for one in late], e.layers)}."
    ]


def guard(e: Evidence) -> list[str]:
    stopped = [event for event in e.events if event.kind == "stopped"]
    said = []
    if stopped:
        layers = {event.layer for event in stopped}
        first = stopped[0]
        value = "" if first.value is None else f", where {fixed(first.value, 3)} was measured"
        said.append(
            f"The guard stopped the dropping {_times(len(stopped))} in {len(layers)} of {counted(e.layers, 'layer')}, "
            f"first at step {whole(first.step)}{value}: what those layers kept instead saved nothing, so reckon with "
            f"less than {percent(e.drop, 0)} dropped"
            + (f" ({percent(1 - e.kept_share)} over the run)." if e.kept_share is not None else ".")
        )
    if e.guarded:
        said.append(
            f"At the last logged step the guard held {_layers(e.guarded, e.layers)} at the exact backward: nothing is "
            "saved there. A lower drop costs a layer less."
        )
    return said


def routing(e: Evidence) -> list[str]:
    if not e.load or e.busiest is None:
        return []
    last_step, last = e.load[-1]
    begin_step, begin = e.load[0]
    said = []
    if last > 1.5 * begin and last > UNEVEN_EXPERTS:
        text = (
            f"Watch the router: the busiest expert's load over the mean rose from {fixed(begin, 1)} at step "
            f"{whole(begin_step)} to {fixed(last, 1)} at step {whole(last_step)}, mean of layers."
        )
        if e.drop > 0:
            text += " A run with drop=0 and the same seed tells whether dropping has to do with it."
        said.append(text)
    if e.ranks == 1 and last >= UNEVEN_EXPERTS:
        layer, most = e.busiest
        said.append(
            f"Before you spread this model over ranks, record its routing with --trace and play it with lrmoe balance: "
            f"the busiest expert had {fixed(most, 1)} times the mean load at the end ({layer}). On one device that "
            "costs nothing."
        )
    return said


def ranks(e: Evidence) -> list[str]:
    home, planned = e.parallel.get("home_max_over_mean"), e.parallel.get("forward_max_over_mean")
    if e.ranks == 1 or home is None or planned is None:
        return []
    said = []
    if home < EVEN_RANKS:
        said.append(
            f'Set policy="fixed" if copies cost you memory: with every expert at home the busiest rank had '
            f"{fixed(home, 3)} times the mean rows, so there is little to even out."
        )
    elif planned > UNEVEN_RANKS:
        said.append(
            f"Give the planner more slots, or a lower capacity: the busiest rank still had {fixed(planned, 2)} times "
            f"the mean rows as planned ({fixed(home, 2)} with every expert at home)."
        )
    extra = e.parallel.get("extra_dropped", 0.0)
    if extra > 0:
        said.append(
            f"Raise capacity or slots: to fit the capacity, {fixed(extra, 1)} pairs a plan were dropped beyond the "
            "drop."
        )
    return said


def loss_trend(e: Evidence) -> list[str]:
    if len(e.eval_loss) < 2 or e.not_finite is not None:
        return []
    (before_step, before), (last_step, last) = e.eval_loss[-2:]
    low_step, low = min(e.eval_loss, key=lambda pair: pair[1])
    if last > (1 + MOVING) * low:
        return [
            f"Stop near step {whole(low_step)}, or train on more text: the validation loss was lowest there "
            f"({fixed(low, 3)}) and ended at {fixed(last, 3)}."
        ]
    if last < (1 - MOVING) * before:
        return [
            f"Train longer before you compare final losses: the validation loss still fell, from {fixed(before, 3)} at "
            f"step {whole(before_step)} to {fixed(last, 3)} at step {whole(last_step)}."
        ]
    return []


def step_time(e: Evidence) -> list[str]:
    if e.time is None or e.time.whole <= 0:
        return []
    share = e.time.backward / e.time.whole
    if share >= SMALL_SHARE:
        return []
    return [
        f"Expect little from any drop on this model and machine: the experts' backward is {percent(share, 0)} of a "
        f"step ({fixed(e.time.backward, 1)} of {fixed(e.time.whole, 1)} ms), and a drop saves a part of that alone."
    ]


RULES: tuple[Callable[[Evidence], list[str]], ...] = (
    not_finite,
    nothing_dropped,
    cost,
    guard,
    loss_trend,
    ranks,
    routing,
    step_time,
)


def _layers(names: Sequence[str], of: int) -> str:
    """``layer 1 and layer 2``; a count where there are many."""
    if len(names) == of and of > 1:
        return f"all {of} layers"
    if len(names) > _NAMED:
        return f"{len(names)} of {of} layers ({', '.join(names[:2])}, …, {names[-1]})"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number:,} times"


def _small(sentence: str) -> str:
    """A sentence as it stands after a colon."""
    return sentence if sentence.startswith("V*") else sentence[0].lower() + sentence[1:]
