"""What the run page tells a user to do: every sentence needs its numbers, and without them it is not said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lrmoe.report.advice import advise
from lrmoe.report.evidence import Evidence, gather, limit_of, times
from lrmoe.report.run_folder import GuardEvent, LayerPoint, Point, Training

CALM = {"loss": 2.0, "drop": 0.2, "kept_share": 0.8, "load_max_over_mean": 1.4}


def training(
    *,
    steps: int = 10,
    variance: dict[int, int] | float | Callable[[int], float] = 0.02,
    tail: float = 0.001,
    layers: int = 3,
    **values: Any,
) -> Training:
    """Logged every 10 steps; ``variance`` of all layers, or of some; a value may be a function of the step."""
    points = []
    for step in range(10, 10 * steps + 1, 10):
        told = {key: value(step) if callable(value) else value for key, value in {**CALM, **values}.items()}
        by_layer = {
            f"model.layers.{layer}.mlp": LayerPoint(
                values={
                    "variance_share": variance(step) if callable(variance) else _at(variance, layer, step),
                    "kept_importance_share": 1.0 - tail,
                    "load_max_over_mean": told["load_max_over_mean"] + layer / 10,
                    "kept_share": told["kept_share"],
                }
            )
            for layer in range(layers)
        }
        points.append(Point(step=step, values={k: v for k, v in told.items() if v is not None}, layers=by_layer))
    return Training(variant="run", seed=0, points=points)


def _at(until: dict[int, int] | float, layer: int, step: int) -> float:
    """A constant, or 0.3 in the layers named until their step, then 0.01."""
    if isinstance(until, float):
        return until
    return 0.3 if step <= until.get(layer, 0) else 0.01


def evidence(told: Training, **settings: Any) -> Evidence:
    return gather(
        told, {"selector": "pps", "drop": 0.2, "guard_variance": 0.1, "guard_tail": 0.005, **settings}, finished=True
    )


def said(told: Training, **settings: Any) -> str:
    return "\n".join(advise(evidence(told, **settings)))


def test_a_calm_run_is_told_to_keep_its_drop_and_nothing_else() -> None:
    (only,) = advise(evidence(training()))
    assert only.startswith("Keep the drop as it is: V*/ΣR never was above 0.100 (guard_variance)")
    assert "0.020 (layer 0, step 10)" in only
    assert "drop=0" in only


def test_noise_at_the_start_asks_for_a_warm_up_of_that_length() -> None:
    words = said(training(variance={1: 30, 2: 40}))
    assert (
        "Set warmup_steps=40: V*/ΣR was above 0.100 (guard_variance) in layer 1 and layer 2 between steps 10 and 40"
        in words
    )
    assert "Keep the drop" not in words
    assert "Lower the drop" not in words


def test_noise_to_the_end_asks_for_less_and_names_the_layers() -> None:
    words = said(training(variance={0: 20, 2: 100}))
    assert "Lower the drop from 20 %, or set error_budget=0.1" in words
    assert "It still was above when last measured in layer 2." in words
    assert "warmup_steps" not in words


def test_noise_that_comes_and_goes_late_asks_for_an_error_budget() -> None:
    assert "Set error_budget=0.1" in said(training(variance={0: 70}))


def test_without_a_guard_the_default_is_a_yardstick_and_called_so() -> None:
    words = said(training(variance=0.3), guard_variance=None)
    assert "above 0.100 (guard_variance, the default: no guard was on) in all 3 layers" in words


def test_a_tail_of_topq_asks_for_pps() -> None:
    words = said(training(tail=0.02), selector="topq")
    assert 'Set selector="pps": the dropped share of ΣR was above 0.50 % (guard_tail)' in words
    assert "Keep the drop" in said(training(tail=0.001), selector="topq")


def test_that_a_guard_holds_a_layer_is_no_evidence_of_calm() -> None:
    told = training(
        variance=lambda step: 0.3 if step in (10, 70) else 0.0, kept_share=lambda s: 0.8 if s in (10, 70) else 1.0
    )
    words = said(told)
    assert "Lower the drop from 20 %" in words
    assert "It still was above when last measured in all 3 layers" in words
    assert "warmup_steps" not in words


def test_steps_without_a_drop_are_not_held_against_it() -> None:
    words = said(training(variance={0: 50, 1: 50, 2: 50}, drop=lambda step: 0.0 if step <= 50 else 0.2))
    assert "Keep the drop" in words


def test_nothing_dropped_is_a_yardstick() -> None:
    words = said(training(drop=0.0, kept_share=1.0), drop=0.0)
    assert words.startswith("Nothing was dropped here. Keep this run as the yardstick")
    assert "V*" not in words


@pytest.mark.parametrize(("drop", "then"), [(0.2, "Train again with drop=0"), (0.0, "look at the learning rate")])
def test_a_loss_that_is_no_number_comes_first(drop: float, then: str) -> None:
    told = training(drop=drop, kept_share=1 - drop, loss=lambda step: float("nan") if step >= 70 else 2.0)
    first = advise(evidence(told))[0]
    assert "not a finite number at step 70" in first
    assert then in first


def test_what_the_guard_did_is_told_with_its_numbers() -> None:
    told = training(kept_share=0.9)
    name = "model.layers.1.mlp"
    told.points[1].events = [GuardEvent(step=20, layer=name, kind="stopped", value=0.31, limit=0.1)]
    told.points[-1].layers[name].guarded = True
    words = said(told)
    assert "stopped the dropping once in 1 of 3 layers, first at step 20, where 0.310 was measured" in words
    assert "less than 20 % dropped (10.0 % over the run)" in words
    assert "At the last logged step the guard held layer 1 at the exact backward" in words
    assert "guard stopped" not in said(training())


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (1.5, "Train longer before you compare final losses: the validation loss still fell, from 2.000 at step 50"),
        (1.99, None),
    ],
)
def test_a_loss_that_still_falls(last: float, words: str | None) -> None:
    told = said(training(eval_loss=lambda step: {50: 2.0, 100: last}.get(step)))
    assert (words in told) if words else ("Train longer" not in told and "Stop near" not in told)


def test_a_validation_loss_that_rose() -> None:
    words = said(training(eval_loss=lambda step: {40: 2.0, 70: 1.8, 100: 2.1}.get(step)))
    assert (
        "Stop near step 70, or train on more text: the validation loss was lowest there (1.800) and ended at 2.100"
        in words
    )


def test_routing_that_concentrates() -> None:
    words = said(training(load_max_over_mean=lambda step: 1.2 + step / 40))
    assert "rose from 1.4 at step 10 to 3.7 at step 100" in words
    assert "3.9 times the mean load at the end (layer 2)" in words
    assert "lrmoe balance" not in said(training(load_max_over_mean=3.0), ep=2)
    assert "rose" not in said(training(load_max_over_mean=3.0))


def test_ranks() -> None:
    def on_ranks(home: float, planned: float, extra: float = 0.0) -> str:
        told = training()
        for point in told.points:
            point.parallel = {"home_max_over_mean": home, "forward_max_over_mean": planned, "extra_dropped": extra}
        return said(told, ep=2, policy="lrmoe")

    assert 'policy="fixed"' in on_ranks(1.02, 1.02)
    assert "still had 1.30 times the mean rows as planned (1.60 with every expert at home)" in on_ranks(1.6, 1.3)
    assert "Raise capacity or slots" in on_ranks(1.6, 1.05, extra=12.0)
    even = on_ranks(1.6, 1.05)
    assert "slots" not in even
    assert "fixed" not in even


def test_time_that_no_drop_can_save() -> None:
    seconds = {"forward_seconds": 0.1, "seconds": 10.0}
    assert "is 3 % of a step (30.0 of 1,000.0 ms)" in said(training(backward_seconds=0.3, **seconds))
    assert "Expect little" not in said(training(backward_seconds=4.0, **seconds))
    assert "Expect little" not in said(training())


def test_a_step_is_timed_between_validations() -> None:
    told = training(
        forward_seconds=0.1,
        backward_seconds=0.2,
        seconds=lambda step: 9.0 if step % 50 == 0 else 1.0,
        eval_loss=lambda step: 2.0 if step % 50 == 0 else None,
    )
    lines, validated, left_out = times(told)
    assert [line[0] for line in lines] == [10, 20, 30, 40, 60, 70, 80, 90]
    assert lines[0][1:] == pytest.approx((10.0, 20.0, 70.0))
    assert not validated
    assert left_out == 0


def test_parts_longer_than_the_whole_are_counted() -> None:
    told = training(forward_seconds=0.1, backward_seconds=0.2, seconds=lambda step: 0.2 if step == 30 else 1.0)
    lines, _, left_out = times(told)
    assert (len(lines), left_out) == (9, 1)


def test_an_empty_run_needs_nothing() -> None:
    assert advise(evidence(Training(variant="run", seed=0, points=[]))) == [
        "Nothing in these records calls for a change."
    ]


@pytest.mark.parametrize("value", [None, True, "0.1", -1])
def test_a_limit_that_is_none_is_the_default(value: object) -> None:
    limit = limit_of({"guard_variance": value})
    assert (limit.value, limit.in_force) == (0.1, False)
