"""The gated activation between the two expert projections, forward and backward, with what selection needs of it.

N or M rows, F expert width. Elementwise work runs on blocks of rows small enough to stay in the cache, in fp32 or
better whatever the storage dtype, so that half precision rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.activations import Activation
from lrmoe.recalibration.norms import row_norms

_BLOCK_ELEMENTS = 1 << 17


def glu_forward(h_N2F: Tensor, activation: Activation, *, live: int, norms: bool) -> tuple[Tensor, Tensor]:
    """(phi_NF, phi_root_N): the down projection's input and, if ``norms``, the square roots of
    its 2-norms in fp32 or better: four bytes hold the root of any norm, though not the norm of every row.

    The norms are of phi as stored, i.e. after rounding to its dtype. Rows from ``live`` on are neither read nor
    written; their roots are 0.
    """
    num_rows, width = h_N2F.shape[0], h_N2F.shape[1] // 2
    dtype = _working(h_N2F)
    phi_NF = h_N2F.new_empty(num_rows, width)
    phi_root_N = h_N2F.new_zeros(num_rows if norms else 0, dtype=dtype)
    for rows in blocks(live, width, h_N2F.device):
        gate, up = activation.split(h_N2F[rows].to(dtype))
        phi_NF[rows] = activation.forward(gate, up)
        if norms:
            phi_root_N[rows] = row_norms(phi_NF[rows]).sqrt_()
    return phi_NF, phi_root_N


def glu_backward(
    h_N2F: Tensor,
    row_M: Tensor | None,
    t_MF: Tensor,
    scale_M: Tensor,
    phi_scale_M: Tensor,
    activation: Activation,
    *,
    gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh_M2F, scaled_phi_MF, dalpha_M) from t = W_down^T g, unscaled.

    dphi = scale * t gives dh; scaled_phi = phi_scale * phi is the operand of the down projection's wgrad;
    dalpha = <t, phi> in fp32 or better. With ``gradients=False`` only dalpha is computed.

    Args:
        h_N2F: up projections; row i of the result belongs to row ``row_M[i]`` of it, or to row i if None. Gathering
            here, block by block, spares an (M, 2F) copy.
    """
    num_rows, width = t_MF.shape
    dtype = _working(h_N2F)
    dh_M2F = h_N2F.new_empty(num_rows if gradients else 0, 2 * width)
    scaled_phi_MF = torch.empty_like(t_MF) if gradients else t_MF.new_empty(0, width)
    dalpha_M = h_N2F.new_empty(num_rows, dtype=dtype)
    for rows in blocks(num_rows, width, h_N2F.device):
        h = h_N2F[rows] if row_M is None else h_N2F.index_select(0, row_M[rows])
        gate, up = activation.split(h.to(dtype))
        t = t_MF[rows].to(dtype)
        if not gradients:
            torch.sum(activation.forward(gate, up).mul_(t), dim=-1, out=dalpha_M[rows])
            continue
        scale = scale_M[rows, None].to(dtype)
        phi, dgate, dup = activation.backward(gate, up, t * scale)
        torch.sum(t.mul(phi), dim=-1, out=dalpha_M[rows])
        scaled_phi_MF[rows] = phi.mul_(phi_scale_M[rows, None].to(dtype))
        gate_out, up_out = activation.split(dh_M2F[rows])
        gate_out.copy_(dgate)
        up_out.copy_(dup)
    return dh_M2F, scaled_phi_MF, dalpha_M


def _working(h: Tensor) -> torch.dtype:
    return torch.promote_types(h.dtype, torch.float32)


def blocks(num_rows: int, width: int, device: torch.device) -> list[slice]:
    """Rows in blocks that stay in a CPU's cache; all at once elsewhere."""
    step = max(1, _BLOCK_ELEMENTS // max(width, 1)) if device.type == "cpu" else max(num_rows, 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
