"""The guard of an attached model: sums of each step in, layers that stop dropping out, and a word to the user.

What is decided, and from what, is in :mod:`lrmoe.recalibration.guard`. Here is when: sums stay on the device, and the
host reads those of all layers at once, at the end of each window. L layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig, require_count, require_number
from lrmoe.labels import layer_label
from lrmoe.recalibration.guard import PAUSE, WINDOW, LayerState, Limit, Sums, after_window, limit_of, mean_share

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lrmoe.layer import ExpertsEngine

logger = logging.getLogger("lrmoe")
# What may happen to a layer, as events say it.
KINDS = ("stopped", "resumed")
# What an event says, in the order in which a state has it.
_EVENT = ("step", "layer", "kind", "value", "limit")
# Layers named in one line of the log.
_NAMED = 8


class Guard:
    """Which layers of a model may not drop at present.

    Attributes:
        limit: what a layer may cost; None if nothing is watched, and then nothing here costs anything.
        events: what happened since they were last cleared: dictionaries with ``step`` (optimizer steps done), ``layer``
            (its name; the empty one for a model that is the layer itself), ``kind`` (``"stopped"`` or ``"resumed"``),
            ``value`` (the mean over the window that was above the limit; None where a layer resumes) and ``limit``.
    """

    def __init__(self, config: LRMoEConfig, names: Sequence[str]) -> None:
        self.limit: Limit | None = limit_of(config)
        self.events: list[dict[str, Any]] = []
        self._names = list(names)
        self._states = [LayerState() for _ in names]
        self._window: list[Tensor] = []

    @property
    def exact(self) -> list[bool]:
        """For each layer whether it drops nothing because of its guard."""
        return [state.rest > 0 for state in self._states]

    def after_step(
        self,
        sums_L3: Tensor,
        step: int,
        engines: Sequence[tuple[ExpertsEngine, list[int]]] = (),
        load_group: ProcessGroup | None = None,
    ) -> bool:
        """Takes the sums of a step that had a drop, and decides where it ends a window.

        The sums of all ranks that decide together are added up at once, not at the end of the window: then the state of
        the guard is the same on all of them at every step, and a checkpoint that one of them writes is that of all.

        Args:
            sums_L3: what this process computed, see :func:`as_sums`.
            step: optimizer steps done, this one included.
            engines: what adds up over ranks that share experts, with the layers it is of; a collective each.
            load_group: the ranks that train copies of the model on other tokens; a collective.

        Returns:
            Whether a layer stopped or resumed.
        """
        assert self.limit is not None
        ranks = [engine.rank for engine, _ in engines]
        for engine, places in engines:
            sums_L3[places] = engine.add_up(sums_L3[places], what="guard")
        if load_group is not None:
            parts = [torch.empty_like(sums_L3) for _ in range(load_group.size())]
            torch.distributed.all_gather(parts, sums_L3, group=load_group)
            # In order of rank, so that all find the same sum bit for bit.
            sums_L3 = torch.stack(parts).sum(0)
            ranks.append(load_group.rank())
        self._window.append(sums_L3)
        # Of ranks that decide together one tells the user.
        return len(self._window) == WINDOW and self._decide(step, speaks=not any(ranks))

    def _decide(self, step: int, *, speaks: bool) -> bool:
        assert self.limit is not None
        # The one synchronisation of a window. Steps that a checkpoint brought back may lie on another device.
        window_SL3 = torch.stack([row.to(self._window[-1].device) for row in self._window]).tolist()
        self._window = []
        stopped: list[tuple[str, float, int]] = []
        resumed: list[str] = []
        for place, name in enumerate(self._names):
            before = self._states[place]
            share = mean_share((Sums(*row[place]) for row in window_SL3), self.limit)
            after = self._states[place] = after_window(before, share, self.limit)
            if after.rest > 0 and before.rest == 0:
                assert share is not None
                stopped.append((name, share, after.rest))
                self._add_event(step, name, "stopped", share)
            elif after.rest == 0 and before.rest > 0:
                resumed.append(name)
                self._add_event(step, name, "resumed", None)
        if stopped and speaks:
            logger.warning("%s", _say_stopped(step, stopped, self.limit, len(self._names)))
        if resumed and speaks:
            logger.info("step %d: drops again, for now: %s", step, _listed(list(map(layer_label, resumed))))
        return bool(stopped or resumed)

    def _add_event(self, step: int, layer: str, kind: str, value: float | None) -> None:
        assert self.limit is not None
        self.events.append(dict(zip(_EVENT, (step, layer, kind, value, self.limit.value), strict=True)))

    def reset(self) -> None:
        """Begins anew, as at the start of a run."""
        self.events = []
        self._states = [LayerState() for _ in self._names]
        self._window = []

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; synchronises with the device.

        Of one form from the first step to the last: checkpoints that take a state apart (torch.distributed.checkpoint)
        look for the parts of the one they load into, and a dictionary in a list is a part of its own. So an event is
        the list of its values.
        """
        return {
            "rest": [state.rest for state in self._states],
            "pause": [state.pause for state in self._states],
            "window": [row.tolist() for row in self._window],
            # Layers by number: a wrapper changes names.
            "events": [list({**event, "layer": self._names.index(event["layer"])}.values()) for event in self.events],
        }

    def load_state_dict(self, state: Any) -> None:
        """Continues from :meth:`state_dict`, of a model with the same layers in the same order. A guard that watches
        nothing has nothing to continue.

        Raises:
            ValueError: if it is none; nothing has changed then.
        """
        if self.limit is None:
            return
        try:
            states, window, events = self._read(state)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"this is not a recalibrator's state: its guard cannot be read ({error!r})") from None
        self._states, self._window, self.events = states, window, events

    def _read(self, state: Any) -> tuple[list[LayerState], list[Tensor], list[dict[str, Any]]]:
        rests = [require_count("rest", rest) for rest in state["rest"]]
        pauses = [require_count("pause", pause, least=PAUSE) for pause in state["pause"]]
        if len(rests) != len(self._names) or any(rest % WINDOW for rest in rests):
            raise ValueError(f"rest={rests}")
        window = [torch.tensor(row, dtype=torch.float64, device="cpu") for row in state["window"]]
        if len(window) >= WINDOW or any(row.shape != (len(self._names), 3) for row in window):
            raise ValueError(f"a window of {len(window)} steps")
        events = [self._read_event(event) for event in state["events"]]
        return [LayerState(rest, pause) for rest, pause in zip(rests, pauses, strict=True)], window, events

    def _read_event(self, event: Any) -> dict[str, Any]:
        if not isinstance(event, Mapping):  # The older form.
            event = dict(zip(_EVENT, event, strict=True))
        value = event["value"]
        if event["kind"] not in KINDS:
            raise ValueError(f"kind={event['kind']!r}")
        return {
            "step": require_count("step", event["step"]),
            "layer": self._names[require_count("layer", event["layer"])],
            "kind": event["kind"],
            "value": None if value is None else require_number("value", value),
            "limit": require_number("limit", event["limit"]),
        }


def _say_stopped(step: int, stopped: Sequence[tuple[str, float, int]], limit: Limit, layers: int) -> str:
    named = [f"{layer_label(name)} ({limit.measure} {value:.3g}, for {rest} steps)" for name, value, rest in stopped]
    return (
        f"{_own_rank()}step {step}: dropping costs too much in {len(stopped)} of {layers} MoE layers, above "
        f"{limit.field}={limit.value:g}; the exact backward there, then another try: {_listed(named)}. A lower drop "
        f"costs less; {limit.field}=None (--{limit.field.replace('_', '-')} none) turns this guard off"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _own_rank() -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return ""
    return f"rank {distributed.get_rank()}, "


def as_sums(sums: Mapping[int, Tensor], layers: int, device: torch.device) -> Tensor:
    """One step's (sum of R, of kept R, of V*) of each layer, (L, 3) fp64. Does not synchronise.

    Args:
        sums: (3,) of the layers that ran a backward, by number; the others get zeros, as do those whose sums are not
            finite.
        device: where the result lies if no layer has sums; else it lies with the first.
    """
    device = next(iter(sums.values())).device if sums else device
    nothing = torch.zeros(3, dtype=torch.float64, device=device)
    sums_L3 = torch.stack([sums[place].to(device) if place in sums else nothing for place in range(layers)])
    return torch.where(sums_L3.isfinite().all(dim=-1, keepdim=True), sums_L3, 0.0)
