"""Which optimizer's steps can be followed: wrappers have none of torch's hooks."""

from __future__ import annotations

from typing import Any

import torch


def hookable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose own step runs: wrappers such as accelerate's have no hooks.

    Raises:
        ValueError: if there is none.
    """
    inner = innermost(optimizer)
    if inner is None:
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, whose steps cannot be followed; leave it out and call the "
            "recalibrator's step() after each of its steps"
        )
    return inner


def innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    while optimizer is not None and not hasattr(optimizer, "_optimizer_step_post_hooks"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer  # type: ignore[no-any-return]
