"""``lrmoe doctor``: does this installation, and this model on it, train as it should?

Everything is measured on the spot, on a small batch of random tokens: gradients against the stock experts and against
the loop of :mod:`lrmoe.experts.reference`, and one optimizer step that has to move just the experts that kept a pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import torch

from lrmoe.config import LRMoEConfig, Selector
from lrmoe.doctor import installation
from lrmoe.doctor.measure import Failed, dtype_name
from lrmoe.doctor.model import Patient, layers_found, load, ways

__all__ = ["Check", "DoctorReport", "diagnose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at: ``ok``, and in ``detail`` what was found."""

    name: str
    ok: bool
    detail: str


@dataclass(kw_only=True, slots=True)
class DoctorReport:
    """All checks in the order they ran. ``ok`` if every one is."""

    model: str | None
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def diagnose(
    model: str | None = None,
    *,
    config: LRMoEConfig | None = None,
    compile: bool = False,
    device: str | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> DoctorReport:
    """Checks the installation and a model.

    Args:
        model: a preset or a checkpoint folder (loaded in float32); the default is the preset ``qwen3-moe-tiny``, or no
            model where Transformers is not installed.
        config: the recalibration to check; its schedule is left out.
        compile: also train one step under torch.compile, which takes a minute.
        device: default ``cuda`` where there is one, else ``cpu``.
        on_check: called with each check as it is done.

    Raises:
        ValueError: if ``model`` is neither a preset nor a folder that loads, or if there is no such ``device``.
            Everything else becomes a failed check.
    """
    config = LRMoEConfig() if config is None else config
    config = LRMoEConfig(**{**config.to_dict(), "warmup_steps": 0, "ramp_steps": 0, "final_dense_steps": 0})
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from None
    transformers = installation.version("transformers")
    if model is None and transformers is not None:
        model = "qwen3-moe-tiny"
    if model is not None and transformers is None:
        raise ValueError(
            f'model={model!r} needs Transformers: in a clone of LRMoE, pip install -e ".[train]"; or check without '
            "a model"
        )
    loaded = None if model is None else load(model, device)

    report = DoctorReport(model=model)
    examine = functools.partial(_examine, report, on_check)
    examine("versions", installation.versions)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        examine(f"grouped GEMM, {dtype_name(dtype)}", functools.partial(installation.grouped_gemm, dtype, device))
    for selector in get_args(Selector):
        examine(f"operator against the loop, {selector}", functools.partial(installation.operator, selector, device))
    if config.remainder != "none":
        completed = functools.partial(installation.operator, config.selector, device, config.remainder)
        examine(f"operator against the loop, {config.selector} with remainder={config.remainder}", completed)
    if loaded is not None and examine("layers found", functools.partial(layers_found, loaded)):
        patient = Patient(loaded, device)
        examine("loss equals stock", patient.loss_equals_stock)
        examine("gradients at drop=0 equal stock", patient.gradients_equal_stock)
        against_loop = functools.partial(patient.gradients_equal_loop, config)
        examine(f"gradients at drop={config.drop:g} equal the loop", against_loop)
        for way in ways(loaded, compile):
            examine(f"experts learn{way}", functools.partial(patient.experts_learn, config, way))
    return report


def _examine(
    report: DoctorReport, on_check: Callable[[Check], None] | None, name: str, look: Callable[[], str]
) -> bool:
    try:
        check = Check(name=name, ok=True, detail=look())
    except Failed as failed:
        check = Check(name=name, ok=False, detail=str(failed))
    except Exception as error:  # What a broken installation raises cannot be listed.
        check = Check(name=name, ok=False, detail=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    report.checks.append(check)
    if on_check is not None:
        on_check(check)
    return check.ok
