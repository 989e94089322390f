"""What a user can set. Frozen, keyword-only, validated when built: a wrong value never reaches a kernel."""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, get_args

from lrmoe.problems import Problems

Selector = Literal["topq", "pps", "random", "auto"]
Metric = Literal["lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random"]
Quota = Literal["expert", "level", "pooled"]
RouterGrad = Literal["exact", "sum_rule", "kept"]
Save = Literal["preactivation", "input"]
Remainder = Literal["none", "mean"]
_CHOICES = {
    "selector": Selector,
    "metric": Metric,
    "quota": Quota,
    "router_grad": RouterGrad,
    "save": Save,
    "remainder": Remainder,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LRMoEConfig:
    """How the backward of a mixture-of-experts layer is recalibrated.

    Args:
        drop: fraction of token-expert pairs the backward may leave out, in [0, 1). 0 is the exact backward.
        selector: which pairs of an expert fill its quota. ``"pps"`` (default) samples in proportion to the
            importance and reweights, so the gradient is unbiased; ``"topq"`` keeps the most important and is
            biased (the paper's; safe only near zero loss); ``"random"`` samples uniformly and reweights;
            ``"auto"`` takes ``topq`` for an expert whose sampling variance would be negligible, else ``pps``.
        metric: the importance R. ``"lrm"`` is alpha^2 ||g||^2 ||phi||^2; the others exist for ablations.
        quota: ``"expert"`` lets every expert keep the same share of its load; ``"level"`` takes all drops from
            the most loaded experts; ``"pooled"`` keeps as many pairs as ``"expert"`` on each rank, and the backward
            splits them over the rank's experts by relative importance.
        router_grad: gradient of the routing weight of dropped pairs: ``"exact"`` (one more down-projection
            dgrad for them), ``"sum_rule"`` (from the layer's output, nearly free) or ``"kept"`` (zero).
        save: ``"preactivation"`` keeps every pair's up projection until the backward; ``"input"`` keeps only
            the layer's input and reruns the up projection for the kept pairs.
        remainder: what stands for dropped pairs in the gradients of their expert's weights: ``"none"``, or ``"mean"``:
            the sum of what the kept pairs miss of alpha g, with the mean operands of the expert's pairs. The importance
            then counts each pair's distance from that mean.
        error_budget: if set, an expert's quota is raised until the error of what is left out is at most this
            fraction of the expert's total importance; ``drop`` then is an upper bound.
        warmup_steps: optimizer steps at the start without any drop.
        ramp_steps: steps after the warm-up over which the drop rises linearly to ``drop``.
        final_dense_steps: optimizer steps at the end without any drop; needs ``total_steps``.
        total_steps: length of the run in optimizer steps; the Trainer callback fills it in.
        guard_variance: limit of V*/sum R, the variance that dropping adds relative to the importance; a layer of an
            attached model that is above it stops dropping for a while (see :class:`~lrmoe.control.Recalibrator`).
            None: never. For every selector but ``"topq"``.
        guard_tail: the same for ``"topq"``: limit of the share of sum R that the dropped pairs hold.
        seed: of the keyed draws, in [0, 2^63).

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    drop: float = 0.2
    selector: Selector = "pps"
    metric: Metric = "lrm"
    quota: Quota = "expert"
    router_grad: RouterGrad = "sum_rule"
    save: Save = "preactivation"
    remainder: Remainder = "none"
    error_budget: float | None = None
    warmup_steps: int = 0
    ramp_steps: int = 0
    final_dense_steps: int = 0
    total_steps: int | None = None
    guard_variance: float | None = 0.1
    guard_tail: float | None = 0.005
    seed: int = 0

    def __post_init__(self) -> None:
        problems = Problems()
        with problems:
            # Numpy's scalars, in which sweeps come, become plain numbers: a config is written as JSON.
            object.__setattr__(self, "drop", require_number("drop", self.drop))
            if not 0.0 <= self.drop < 1.0:
                raise ValueError(
                    f"drop={self.drop!r} must be in [0, 1): the fraction of pairs the backward may leave out; 0 is the "
                    "exact backward"
                )
        for field, choices in _CHOICES.items():
            with problems:
                value = getattr(self, field)
                if not isinstance(value, str) or value not in get_args(choices):
                    raise ValueError(f"{field}={value!r} is not known; choose one of {', '.join(get_args(choices))}")
        with problems:
            if self.error_budget is not None:
                object.__setattr__(self, "error_budget", require_number("error_budget", self.error_budget))
                if not 0.0 <= self.error_budget < math.inf:
                    raise ValueError(
                        f"error_budget={self.error_budget!r} must be a finite number >= 0 (a fraction of the total "
                        "importance, e.g. 0.025) or None"
                    )
        for field in ("guard_variance", "guard_tail"):
            with problems:
                if getattr(self, field) is not None:
                    limit = require_number(field, getattr(self, field))
                    object.__setattr__(self, field, limit)
                    if not 0.0 < limit < math.inf:
                        raise ValueError(
                            f"{field}={limit!r} must be a finite number above 0 (a fraction of the total importance, "
                            "e.g. 0.1) or None for no guard"
                        )
        for field in ("warmup_steps", "ramp_steps", "final_dense_steps", "total_steps", "seed"):
            with problems:
                value = getattr(self, field)
                if field != "total_steps" or value is not None:
                    object.__setattr__(self, field, require_count(field, value))
        problems.tell()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; ``LRMoEConfig(**config.to_dict())`` gives the same config back."""
        return asdict(self)


def require_number(field: str, value: object) -> float:
    """``value`` as a plain number, finite or infinite; ValueError naming ``field`` if it is no real number."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{field}={value!r} must be a number")
    return value if type(value) is int else number


def require_count(field: str, value: Any, *, least: int = 0) -> int:
    """``value`` as a plain int; ValueError naming ``field`` if it is no integer in [least, 2^63)."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise ValueError(f"{field}={value!r} must be an integer >= {least}")
    if count >= 2**63:
        raise ValueError(f"{field}={value} must be below 2**63")
    return count


_DEFAULT = LRMoEConfig()


def require_config(config: object) -> LRMoEConfig:
    """``config``, or the default for None; ValueError for anything else."""
    if config is None:
        return _DEFAULT
    if not isinstance(config, LRMoEConfig):
        raise ValueError(f"config={config!r} must be an LRMoEConfig, e.g. lrmoe.LRMoEConfig(drop=0.2)")
    return config
