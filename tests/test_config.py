"""The configuration: what is refused, with which words, and that it survives being copied and stored."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lrmoe import LRMoEConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("drop", value) for value in (1.0, -0.1, 2, math.nan, math.inf, 10**400, True, np.True_, "0.2", None, 1j)),
        *(("error_budget", value) for value in (-1.0, math.nan, math.inf, 10**400, False, "0.1")),
        *(("selector", value) for value in ("PPS", "", None, 3, ["pps"])),
        *((field, "x") for field in ("metric", "quota", "router_grad", "save")),
        *(("seed", value) for value in (-1, 2**63, np.uint64(2**63), 1.0, "1", None, True)),
        *((field, -1) for field in ("warmup_steps", "ramp_steps", "final_dense_steps", "total_steps")),
        *((field, np.True_) for field in ("warmup_steps", "ramp_steps", "final_dense_steps", "total_steps")),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        LRMoEConfig(**{field: value})
    with pytest.raises(ValueError, match=f"{field}="):
        replace(LRMoEConfig(), **{field: value})


def test_numpy_scalars_become_plain_numbers() -> None:
    config = LRMoEConfig(
        drop=np.float32(0.25),  # type: ignore[arg-type]
        error_budget=np.float64(0.5),
        warmup_steps=np.int32(2),  # type: ignore[arg-type]
        total_steps=np.int64(9),  # type: ignore[arg-type]
        seed=np.uint8(3),  # type: ignore[arg-type]
    )
    assert config == LRMoEConfig(drop=0.25, error_budget=0.5, warmup_steps=2, total_steps=9, seed=3)
    assert {type(value) for value in config.to_dict().values()} <= {int, float, str, type(None)}


@pytest.mark.parametrize("config", [LRMoEConfig(), LRMoEConfig(drop=0, error_budget=0, seed=2**63 - 1, total_steps=5)])
def test_copies_are_equal(config: LRMoEConfig) -> None:
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert LRMoEConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert hash(replace(config)) == hash(config)
