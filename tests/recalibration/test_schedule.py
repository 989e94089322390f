"""The drop in force at each optimizer step."""

from __future__ import annotations

import pytest

from lrmoe import LRMoEConfig
from lrmoe.recalibration.schedule import drop_at


def drops(steps: int, **options: object) -> list[float]:
    config = LRMoEConfig(drop=0.4, **options)  # type: ignore[arg-type]
    return [round(drop_at(config, step), 12) for step in range(steps)]


def test_without_a_schedule_the_drop_is_constant() -> None:
    assert drops(3) == [0.4, 0.4, 0.4]
    assert drop_at(LRMoEConfig(drop=0.4), 10**9) == 0.4


def test_warm_up_ramp_plateau_and_dense_tail() -> None:
    found = drops(12, warmup_steps=2, ramp_steps=4, final_dense_steps=3, total_steps=11)
    assert found == [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.0, 0.0, 0.0, 0.0]


def test_a_ramp_of_one_step_is_none_and_a_ramp_alone_starts_at_once() -> None:
    assert drops(3, warmup_steps=1, ramp_steps=1) == drops(3, warmup_steps=1) == [0.0, 0.4, 0.4]
    assert drops(3, ramp_steps=2) == [0.2, 0.4, 0.4]


def test_the_tail_wins_over_warm_up_and_ramp() -> None:
    assert drops(4, ramp_steps=4, final_dense_steps=2, total_steps=4) == [0.1, 0.2, 0.0, 0.0]
    assert drops(2, final_dense_steps=5, total_steps=2) == [0.0, 0.0]


def test_a_tail_needs_to_know_the_end() -> None:
    with pytest.raises(ValueError, match=r"final_dense_steps=5 needs total_steps"):
        drops(1, final_dense_steps=5)
