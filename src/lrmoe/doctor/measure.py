"""Comparing gradients, and how a check says that it did not pass."""

from __future__ import annotations

import torch
from torch import Tensor

Gradients = dict[str, Tensor]


class Failed(Exception):
    """A check that did not pass; the message is its detail."""


def require_close(found: Gradients, expected: Gradients, *, limit: float) -> str:
    if found.keys() != expected.keys():
        raise Failed(f"gradients of other parameters: {', '.join(sorted(found.keys() ^ expected.keys())[:4])}")
    # Some gradients are zero but for rounding, e.g. of an attention key's bias: none is measured on its own noise.
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in expected.values())
    deviations = {name: deviation(found[name], expected[name], floor) for name in expected}
    worst = max(deviations, key=lambda name: deviations[name])
    if not deviations[worst] <= limit:
        raise Failed(f"{worst} deviates by {deviations[worst]:.1e} of its largest entry (limit {limit:.0e})")
    return f"within {deviations[worst]:.0e}"


def deviation(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest expected entry; nan where there is one."""
    largest = expected.abs().max().clamp(min=max(floor, torch.finfo(torch.float32).tiny))
    return float(((found.double() - expected.double()).abs().max() / largest).detach())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device=device, dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
