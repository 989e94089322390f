"""Policies by name."""

from __future__ import annotations

import inspect
from typing import Any

from lrmoe.balance.eplb import EPLB
from lrmoe.balance.fastermoe import FasterMoE
from lrmoe.balance.fixed import Fixed
from lrmoe.balance.flexmoe import FlexMoE
from lrmoe.balance.laer import LAER
from lrmoe.balance.lrmoe import LRMoE
from lrmoe.balance.policy import Policy
from lrmoe.balance.smartmoe import SmartMoE
from lrmoe.balance.symi import SYMI
from lrmoe.balance.ultraep import UltraEP

_CLASSES: tuple[type[Policy], ...] = (Fixed, UltraEP, LRMoE, SYMI, LAER, FlexMoE, SmartMoE, FasterMoE, EPLB)
_POLICIES = {policy.name: policy for policy in _CLASSES}


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
    known = list(inspect.signature(_POLICIES[name]).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}"
        )
    return _POLICIES[name](**options)
