"""Gated activations phi = f(gate, up) and their derivatives in closed form, by name.

A name is ``silu``, ``gelu`` (erf), ``gelu_tanh``, ``relu``, or ``clamped_swiglu(alpha=1.702,limit=7.0)``. The suffix
``|interleaved`` says that gate and up rows of the up projection alternate (gate even) instead of gate coming first.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# (gate, up, dphi) -> (phi, dgate, dup)
_Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
# (gate, up) -> (dphi/dgate, dphi/dup)
_Slopes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Activation:
    """``forward(gate, up) -> phi``; ``backward(gate, up, dphi) -> (phi, dgate, dup)``; ``slopes(gate, up)``, the
    derivatives of phi by the two; elementwise, any shape."""

    name: str
    forward: Callable[[Tensor, Tensor], Tensor]
    backward: _Backward
    slopes: _Slopes
    interleaved: bool = False

    def __reduce__(self) -> tuple[Callable[[str], Activation], tuple[str]]:
        # Copied and pickled by name: its functions are closures.
        return get, (self.name,)

    def split(self, h_N2F: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the gate and the up columns."""
        if self.interleaved:
            return h_N2F[..., 0::2], h_N2F[..., 1::2]
        return h_N2F.chunk(2, dim=-1)[0], h_N2F.chunk(2, dim=-1)[1]


@functools.cache
def get(name: str) -> Activation:
    """The activation called ``name``.

    Raises:
        ValueError: for an unknown name, with those that exist.
    """
    if not isinstance(name, str):
        raise ValueError(f"activation={name!r} must be a name such as 'silu'")
    base, _, layout = name.partition("|")
    if layout not in ("", "interleaved"):
        raise ValueError(f"activation={name!r}: the layout after '|' can only be 'interleaved'")
    if base in _GLU:
        act, act_and_slope = _GLU[base]
        return Activation(name, *_gated(act, act_and_slope), interleaved=bool(layout))
    number = r"([-+0-9.e]+)"
    clamped = re.fullmatch(rf"clamped_swiglu\(alpha={number},limit={number}\)", base)
    if clamped:
        try:
            alpha, limit = float(clamped[1]), float(clamped[2])
        except ValueError:
            alpha = limit = math.nan
        if not (math.isfinite(alpha) and 0 < limit < math.inf):
            raise ValueError(f"activation={name!r}: alpha must be a finite number, limit a finite number > 0")
        return Activation(name, *_clamped_swiglu(alpha, limit), interleaved=bool(layout))
    raise ValueError(
        f"activation={name!r} is not known; choose one of {', '.join(_GLU)}, clamped_swiglu(alpha=..,limit=..)"
    )


def _gated(
    act: Callable[[Tensor], Tensor], act_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Callable[[Tensor, Tensor], Tensor], _Backward, _Slopes]:
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    def backward(gate: Tensor, up: Tensor, dphi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = act_and_slope(gate)
        return value * up, slope.mul_(up).mul_(dphi), value * dphi

    def slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = act_and_slope(gate)
        return slope.mul_(up), value

    return forward, backward, slopes


def _silu(gate: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    value = gate * sigmoid
    # sig (1 + a (1 - sig)) = sig + value (1 - sig)
    return value, torch.addcmul(value, value - 1, sigmoid, value=-1)


def _relu(gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate.relu(), (gate > 0).to(gate.dtype)


def _gelu(gate: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    return F.gelu(gate), cdf + gate * density


def _gelu_tanh(gate: Tensor) -> tuple[Tensor, Tensor]:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    bend = torch.tanh(scale * (gate + cubic * gate.pow(3)))
    slope = 0.5 * (1 + bend) + 0.5 * gate * (1 - bend.square()) * scale * (1 + 3 * cubic * gate.square())
    return F.gelu(gate, approximate="tanh"), slope


_GLU: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "silu": (F.silu, _silu),
    "gelu": (F.gelu, _gelu),
    "gelu_tanh": (functools.partial(F.gelu, approximate="tanh"), _gelu_tanh),
    "relu": (F.relu, _relu),
}


def _clamped_swiglu(alpha: float, limit: float) -> tuple[Callable[[Tensor, Tensor], Tensor], _Backward, _Slopes]:
    """gpt-oss: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha g) with g = min(gate, limit)."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)

    def backward(gate: Tensor, up: Tensor, dphi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside_gate = (gate <= limit).to(gate.dtype)
        inside_up = ((up >= -limit) & (up <= limit)).to(up.dtype)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        sigmoid = torch.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid * (1 + alpha * gate * (1 - sigmoid))
        return value * up, slope * inside_gate * up * dphi, value * inside_up * dphi

    def slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return backward(gate, up, torch.ones_like(gate))[1:]

    return forward, backward, slopes
