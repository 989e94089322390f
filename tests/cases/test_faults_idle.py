"""What moves without a gradient of its own."""

from __future__ import annotations

import torch

import lrmoe


def test_s8_an_idle_expert_has_zeros_for_a_gradient_and_moves_by_weight_decay_alone() -> None:
    """As docs/method.md says: AdamW decays the weights of an expert that no token visits, and nothing else does."""
    torch.manual_seed(0)
    moe = lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=1, normalize=False)
    with torch.no_grad():
        moe.router.weight[3] = 0.0
        moe.router.weight[:3, 0] = 50.0
    weights = {name: p.detach().clone() for name, p in moe.experts.named_parameters()}
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        x = torch.rand(12, 8) + torch.eye(8)[0]
        moe(x).square().sum().backward()
        for p in moe.experts.parameters():
            assert p.grad is not None
            assert (p.grad[3] == 0).all()
        optimizer.step()
        moe.step()
    for name, p in moe.experts.named_parameters():
        assert torch.allclose(p[3], weights[name][3] * (1 - 0.01 * 0.1) ** 5, rtol=1e-5, atol=0)
        assert not torch.equal(p[3], weights[name][3])
