"""What the cases share: their standard size, a router that misbehaves, and memory that is not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from experts.problem import Problem, make
from torch import Tensor, nn

from lrmoe import LRMoEConfig, MoE

# T=64, D=16, F=32, E=8, K=2, SwiGLU, no bias, fp32.
TOKENS, DIM, WIDTH, EXPERTS, TOP_K = 64, 16, 32, 8, 2


def standard(**options: Any) -> Problem:
    """The standard problem for the operator."""
    sizes = {"tokens": TOKENS, "dim": DIM, "width": WIDTH, "experts": EXPERTS, "top_k": TOP_K, "dtype": torch.float32}
    return make(**{**sizes, **options})


def layer(config: LRMoEConfig | None = None, **options: Any) -> MoE:
    """The standard layer, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"dim": DIM, "expert_dim": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoE(config=config or LRMoEConfig(drop=0.5), **{**sizes, **options})


class NoisyOnReplay(nn.Module):
    """A router whose first call is clean and whose later calls see noise of their own, as dropout without a kept
    generator state gives it."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.calls = 0

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None) -> Any:
        self.calls += 1
        if self.calls > 1:
            generator = torch.Generator().manual_seed(self.calls)
            x_TD = x_TD + torch.randn(x_TD.shape, generator=generator)
        return self.router(x_TD, mask_T)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory reads as NaN, so that a read of what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)


def into(main_grad: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's fresh gradient into a buffer of another precision, as mixed-precision optimizers
    do."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        main_grad.add_(parameter.grad)
        parameter.grad = None

    return hook
