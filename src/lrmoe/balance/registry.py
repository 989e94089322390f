"""Policies by name."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrmoe.balance.policy import Policy

# Module and class of each, imported when a policy is asked for.
_POLICIES = {
    "fixed": ("fixed", "Fixed"),
    "ultraep": ("ultraep", "UltraEP"),
    "lrmoe": ("lrmoe", "LRMoE"),
    "symi": ("baselines.symi", "SYMI"),
    "laer": ("baselines.laer", "LAER"),
    "flexmoe": ("baselines.flexmoe", "FlexMoE"),
    "smartmoe": ("baselines.smartmoe", "SmartMoE"),
    "fastermoe": ("baselines.fastermoe", "FasterMoE"),
    "eplb": ("baselines.eplb", "EPLB"),
}


def names() -> tuple[str, ...]:
    """What :func:`get` knows."""
    return tuple(_POLICIES)


def get(name: str, **options: Any) -> Policy:
    """The policy ``name`` with the given options.

    ``fixed`` (:class:`lrmoe.balance.fixed.Fixed`) computes every expert at home; ``ultraep``
    (:class:`lrmoe.balance.ultraep.UltraEP`) replicates until all ranks have the mean load; ``lrmoe``
    (:class:`lrmoe.balance.lrmoe.LRMoE`) drops first, then uses the fewest replicas under a budget; ``symi``, ``laer``,
    ``flexmoe``, ``smartmoe``, ``fastermoe`` and ``eplb`` are the systems of those names, one module each.

    Raises:
        ValueError: if the name or an option is not known, or an option's value is out of range.
    """
    if not isinstance(name, str) or name not in _POLICIES:
        raise ValueError(f"policy={name!r} is not known; choose one of {', '.join(_POLICIES)}")
    module, kind = _POLICIES[name]
    policy: type[Policy] = getattr(importlib.import_module(f"lrmoe.balance.{module}"), kind)
    known = list(inspect.signature(policy).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}"
        )
    return policy(**options)
