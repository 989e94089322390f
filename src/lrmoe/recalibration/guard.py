"""When a layer stops dropping for a while, and when it tries again: decisions from plain numbers.

The cost of dropping is a share of the layer's importance: V*/sum R, the variance that sampling adds, or for ``topq``,
which has no variance but a bias, the share of sum R that the dropped pairs hold. A *window* is ``WINDOW`` optimizer
steps with a scheduled drop above zero. A layer whose mean share over a window exceeds the limit rests: it drops
nothing for ``PAUSE`` steps. While it keeps every pair its share is zero, whatever it would be, so then it tries again
for one window. Each further failure in a row doubles the rest, so a layer that never settles wastes ever fewer steps
on trying, and one that does waits at most as long again as it has already waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lrmoe.config import LRMoEConfig

# Steps over which shares are averaged before anything is decided: one odd batch must not do it.
WINDOW = 10
# Steps of the first rest; a multiple of WINDOW, as layers stop and start at the ends of windows only.
PAUSE = 50


@dataclass(frozen=True, slots=True)
class Limit:
    """What a layer may cost at most: the field of :class:`LRMoEConfig` that says so, what is measured, its value."""

    field: str
    measure: str
    value: float


@dataclass(frozen=True, slots=True)
class LayerState:
    """``rest``: steps that the layer still drops nothing, 0 for one that drops; ``pause``: steps of its next rest."""

    rest: int = 0
    pause: int = PAUSE


@dataclass(frozen=True, slots=True)
class Sums:
    """One layer's backward passes of one optimizer step: sums of R of all pairs and of the kept ones, and of V*."""

    total: float
    kept: float
    variance: float


def limit_of(config: LRMoEConfig) -> Limit | None:
    """The limit that holds for this configuration; None where nothing is dropped or the guard is off."""
    if config.drop == 0.0:
        return None
    if config.selector == "topq":
        tail = config.guard_tail
        return None if tail is None else Limit("guard_tail", "dropped share of sum R", tail)
    variance = config.guard_variance
    return None if variance is None else Limit("guard_variance", "V*/sum R", variance)


def mean_share(steps: Iterable[Sums], limit: Limit) -> float | None:
    """The mean over the steps of what dropping cost, as a share of sum R; None if no step can be told.

    Each step counts the same, however large its gradients are. Steps without importance, or with sums that are not
    finite, are left out: a loss scaler will have skipped them, and they say nothing of the others.
    """
    shares = []
    for step in steps:
        cost = step.total - step.kept if limit.field == "guard_tail" else step.variance
        if step.total > 0.0 and math.isfinite(step.total) and math.isfinite(cost):
            shares.append(cost / step.total)
    return math.fsum(shares) / len(shares) if shares else None


def after_window(state: LayerState, share: float | None, limit: Limit) -> LayerState:
    """The state of a layer after a window in which its mean share was ``share``.

    A window without a share (nothing ran, or nothing was finite) decides nothing: a layer that drops goes on, and the
    length of its next rest stays.
    """
    if state.rest > 0:
        return LayerState(rest=max(0, state.rest - WINDOW), pause=state.pause)
    if share is None:
        return state
    if share > limit.value:
        return LayerState(rest=state.pause, pause=2 * state.pause)
    return LayerState()
