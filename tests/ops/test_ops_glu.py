"""The gated activations: forward and closed-form backward against autograd, block by block."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.ops import activations, glu
from lrmoe.ops.glu import glu_backward, glu_forward

CLAMPED = "clamped_swiglu(alpha=1.702,limit=1.5)"
NAMES = ["silu", "gelu", "gelu_tanh", "relu", CLAMPED]
ALL = NAMES + [f"{name}|interleaved" for name in NAMES]


def plain(name: str, h: Tensor) -> Tensor:
    """phi with torch's own functions."""
    base, _, layout = name.partition("|")
    gate, up = (h[:, 0::2], h[:, 1::2]) if layout else h.chunk(2, dim=-1)
    if base == CLAMPED:
        gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": F.relu,
    }[base](gate) * up


@pytest.fixture(params=[1 << 17, 20], ids=["one block", "many blocks"], autouse=True)
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glu, "_BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("name", ALL)
def test_forward_and_backward_are_autograds(name: str) -> None:
    h_N2F = (2 * torch.randn(23, 14, dtype=torch.float64)).requires_grad_()
    t_MF = torch.randn(23, 7, dtype=torch.float64)
    scale_M, phi_scale_M = torch.rand(23, dtype=torch.float64), torch.rand(23, dtype=torch.float64)
    activation = activations.get(name)
    phi = plain(name, h_N2F)
    (wanted_dh,) = torch.autograd.grad(phi, h_N2F, scale_M.unsqueeze(-1) * t_MF)
    found_phi, phi_root = glu_forward(h_N2F.detach(), activation, live=23, norms=True)
    assert torch.allclose(found_phi, phi, rtol=1e-13, atol=1e-14)
    assert torch.allclose(phi_root.square(), phi.norm(dim=-1), rtol=1e-12)
    dh, scaled_phi, dalpha = glu_backward(h_N2F.detach(), None, t_MF, scale_M, phi_scale_M, activation)
    assert torch.allclose(dh, wanted_dh, rtol=1e-11, atol=1e-13)
    assert torch.allclose(scaled_phi, phi_scale_M.unsqueeze(-1) * phi, rtol=1e-13, atol=1e-14)
    assert torch.allclose(dalpha, (t_MF * phi).sum(-1), rtol=1e-11, atol=1e-13)
    nothing, none, alone = glu_backward(h_N2F.detach(), None, t_MF, scale_M, phi_scale_M, activation, gradients=False)
    assert nothing.numel() == none.numel() == 0
    assert torch.allclose(alone, dalpha, rtol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_derivatives_at_the_corners_are_torchs(name: str) -> None:
    """Zero, the clamps exactly, and far out, where naive formulas overflow."""
    corners = torch.tensor([-1e4, -100.0, -1.5, -0.0, 0.0, 1.5, 30.0, 1e4], dtype=torch.float64)
    gate, up = (grid.reshape(-1, 1) for grid in torch.meshgrid(corners, corners, indexing="ij"))
    h_N2F = torch.cat([gate, up], dim=1).requires_grad_()
    one = torch.ones(len(gate), dtype=torch.float64)
    (wanted,) = torch.autograd.grad(plain(name, h_N2F).sum(), h_N2F)
    dh, _, _ = glu_backward(h_N2F.detach(), None, one.unsqueeze(-1), one, one, activations.get(name))
    assert dh.isfinite().all()
    assert torch.allclose(dh, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_low_precision_rounds_once(name: str, dtype: torch.dtype) -> None:
    h = (2 * torch.randn(30, 12)).to(dtype)
    t = torch.randn(30, 6).to(dtype)
    scale = torch.rand(30)
    activation = activations.get(name)
    exact_h = h.double().requires_grad_()
    phi = plain(name, exact_h)
    (exact_dh,) = torch.autograd.grad(phi, exact_h, scale.unsqueeze(-1).double() * t.double())
    found_phi, phi_root = glu_forward(h, activation, live=30, norms=True)
    dh, scaled_phi, dalpha = glu_backward(h, None, t, scale, scale, activation)
    assert found_phi.dtype == dh.dtype == scaled_phi.dtype == dtype
    assert phi_root.dtype == dalpha.dtype == torch.float32
    half_ulp = 0.51 * torch.finfo(dtype).eps
    atol = 1e-6
    assert torch.allclose(found_phi.double(), phi, rtol=half_ulp, atol=atol)
    assert torch.allclose(dh.double(), exact_dh, rtol=half_ulp + 1e-5, atol=atol)
    assert torch.allclose(scaled_phi.double(), scale.unsqueeze(-1).double() * phi, rtol=half_ulp, atol=atol)
    # The norms are of phi as stored, the dot products of phi as computed.
    assert torch.allclose(phi_root.double().square(), found_phi.double().norm(dim=-1), rtol=1e-6)
    assert torch.allclose(dalpha.double(), (t.double() * phi).sum(-1), rtol=1e-4, atol=1e-5)


def test_rows_are_gathered_and_rows_past_the_live_ones_never_read() -> None:
    activation = activations.get("silu")
    h = torch.randn(20, 8)
    h[15:] = torch.nan
    phi, phi_root = glu_forward(h, activation, live=15, norms=True)
    assert torch.equal(phi[:15], glu_forward(h[:15].clone(), activation, live=15, norms=True)[0])
    assert (phi_root[15:] == 0).all()
    assert phi_root[:15].isfinite().all()
    assert glu_forward(h, activation, live=15, norms=False)[1].numel() == 0
    rows = torch.tensor([14, 0, 3, 3])
    t, scale = torch.randn(4, 4), torch.rand(4)
    gathered = glu_backward(h, rows, t, scale, scale, activation)
    straight = glu_backward(h[rows], None, t, scale, scale, activation)
    assert all(torch.equal(a, b) for a, b in zip(gathered, straight, strict=True))
    # Fewer rows than saved, in order: the first ones are meant.
    first = glu_backward(h, None, t, scale, scale, activation)
    assert torch.equal(first[0], glu_backward(h[:4], None, t, scale, scale, activation)[0])


def test_inputs_are_left_as_they_were() -> None:
    for name in ALL:
        h, t, scale = torch.randn(5, 8), torch.randn(5, 4), torch.rand(5)
        before = [tensor.clone() for tensor in (h, t, scale)]
        glu_backward(h, None, t, scale, scale, activations.get(name))
        glu_forward(h, activations.get(name), live=5, norms=True)
        glu_backward(h, None, t, scale, scale, activations.get(name), gradients=False)
        assert all(torch.equal(a, b) for a, b in zip(before, (h, t, scale), strict=True))


def test_no_rows() -> None:
    activation = activations.get("silu")
    phi, phi_root = glu_forward(torch.empty(0, 8), activation, live=0, norms=True)
    assert phi.shape == (0, 4)
    assert phi_root.shape == (0,)
    found = glu_backward(torch.empty(0, 8), None, torch.empty(0, 4), torch.empty(0), torch.empty(0), activation)
    assert [tuple(t.shape) for t in found] == [(0, 8), (0, 4), (0,)]


def test_activations_are_copied_and_pickled_by_name() -> None:
    for name in ALL:
        activation = activations.get(name)
        assert activations.get(name) is activation
        assert copy.deepcopy(activation) is activation
        assert pickle.loads(pickle.dumps(activation)) is activation
        assert activation.interleaved == name.endswith("interleaved")
