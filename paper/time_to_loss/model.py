"""A small language model around :class:`lrmoe.MoE` layers, in which the experts are most of the work.

B sequences, S tokens of a sequence, V ids, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrmoe.layer import MoE


class FeedForward(nn.Module):
    """An ordinary SwiGLU block of width 2 D."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to the same shape."""
        gate, up = self.gate_up(x_BSD).chunk(2, dim=-1)
        out_BSD: Tensor = self.down(F.silu(gate) * up)
        return out_BSD


class Block(nn.Module):
    """Causal self-attention and ``feed_forward``, each behind a norm and added to its input."""

    def __init__(self, feed_forward: nn.Module, *, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = feed_forward

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to the same shape."""
        B, S, D = x_BSD.shape
        heads = self.qkv(self.attention_norm(x_BSD)).view(B, S, 3, self.heads, D // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(B, S, D))
        out_BSD: Tensor = self.feed_forward(self.feed_forward_norm(x_BSD))
        return x_BSD + out_BSD


class LanguageModel(nn.Module):
    """Ids to the loss of predicting the next one. The router's balancing loss is not in it; its gradient is added in
    the backward.

    Args:
        vocab_size: V.
        seq: S, the longest sequence.
        dim: D.
        layers: blocks with a MoE layer, after a first one without, as DeepSeek-V3 and GLM-4.5 have it.
        heads: of the attention.
        moe: ``expert_dim``, ``num_experts``, ``top_k`` and ``balance_loss_weight`` of the layers.
    """

    def __init__(self, *, vocab_size: int, seq: int, dim: int, layers: int, heads: int, **moe: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(seq, dim)
        parts: list[nn.Module] = [FeedForward(dim)]
        parts += [MoE(dim=dim, **moe) for _ in range(layers)]  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(Block(part, dim=dim, heads=heads) for part in parts)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """(B, S) int64 to the mean loss in nats per token, a scalar."""
        x_BSD = self.tokens(ids_BS) + self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV = self.head(self.norm(x_BSD[:, :-1]))
        return F.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """For AdamW: matrices decay, norms do not."""
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if "norm" not in name]
    norms = [parameter for name, parameter in named if "norm" in name]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
