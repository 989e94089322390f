"""Versions, grouped GEMMs in each dtype, and the operator against the loop: what does not need a model."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig, Remainder, Selector
from lrmoe.doctor.measure import Failed, deviation, random_tensor, require_close
from lrmoe.experts.meter import recording
from lrmoe.experts.operator import routed_experts
from lrmoe.experts.reference import reference_experts
from lrmoe.ops.grouped_mm import grouped_mm, grouped_wgrad


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> str:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "accelerate"):
        found[package] = version(package) or "not installed"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    text = ", ".join(f"{name} {version}" for name, version in found.items()) + f"; {device}"
    for package, least in (("torch", (2, 10)), ("transformers", (5, 20))):
        parts = found[package].split(".")[:2]
        if parts[0].isdigit() and tuple(int(part) for part in parts) < least:
            raise Failed(f"{text}; {package} must be {least[0]}.{least[1]} or newer")
    return text


def grouped_gemm(dtype: torch.dtype, device: str) -> str:
    a, b = random_tensor((24, 16), dtype, device), random_tensor((4, 16, 8), dtype, device, seed=1)
    c = random_tensor((24, 8), dtype, device, seed=2)
    ends = [7, 7, 20, 24]
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    product = torch.cat([a[rows].double() @ b[i].double() for i, rows in enumerate(groups)])
    wgrad = torch.stack([a[rows].double().T @ c[rows].double() for rows in groups])
    worst = max(deviation(grouped_mm(a, b, offs), product), deviation(grouped_wgrad(a, c, offs), wgrad))
    limit = 4 * torch.finfo(dtype).eps
    if not worst <= limit:
        raise Failed(f"products deviate by {worst:.1e} (limit {limit:.0e})")
    return f"products and weight gradients within {worst:.0e}, an empty group included"


def operator(selector: Selector, device: str, remainder: Remainder = "none") -> str:
    """The recalibrated backward in float64, where rounding cannot hide a mistake."""
    inputs = {
        "x": random_tensor((40, 12), torch.float64, device),
        "weights": random_tensor((40, 2), torch.float64, device, seed=1).sigmoid(),
        "gate_up_proj": random_tensor((6, 16, 12), torch.float64, device, seed=2),
        "down_proj": random_tensor((6, 12, 8), torch.float64, device, seed=3),
    }
    place = torch.arange(40, device=device)
    ids = torch.stack([place % 6, (place * 2 + 1) % 6], dim=1)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    grad = random_tensor((40, 12), torch.float64, device, seed=4)
    config = LRMoEConfig(drop=0.3, selector=selector, remainder=remainder)

    def order(of: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return of["x"], ids, of["weights"], of["gate_up_proj"], of["down_proj"]

    with recording() as calls:
        found = torch.autograd.grad(routed_experts(*order(leaves), config=config), list(leaves.values()), grad)
    reference = reference_experts(
        *order(leaves),
        pair_weight_TK=calls[0].weight_TK.double(),
        router_grad=config.router_grad,
        remainder=remainder,
    )
    expected = torch.autograd.grad(reference, list(leaves.values()), grad)
    # The recorded weights are fp32.
    return require_close(dict(zip(leaves, found, strict=True)), dict(zip(leaves, expected, strict=True)), limit=1e-6)
