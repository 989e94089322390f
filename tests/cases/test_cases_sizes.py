"""What grows with what: no tensor of pairs times experts, and what a drop does not make smaller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.fixtures import DIM, standard
from experts.problem import run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lrmoe
from lrmoe import LRMoEConfig, TopKRouter
from lrmoe.experts import compacted, custom_ops


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation returns; it looks inside the library's own operators."""

    _CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lrmoe":
            with self:
                return func.redispatch(self._CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        self.operations += 1
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_case_53_no_tensor_of_pairs_times_experts() -> None:
    """131072 tokens, 8 of 128 experts each: router with auxiliary losses, experts, selection, record, backward. The
    largest tensor is the router's (T, E), an eighth of the (T, K, E) one-hot that ran others out of memory."""
    tokens, experts, top_k, dim, width = 131072, 128, 8, 4, 4
    router = TopKRouter(dim=dim, num_experts=experts, top_k=top_k, balance_loss_weight=0.01, z_loss_weight=0.001)
    x = torch.randn(tokens, dim)
    with Largest() as largest:
        routing = router(x)
        assert routing.aux_loss is not None
        (routing.topk_weights_TK.sum() + routing.aux_loss).backward()
    assert int(routing.loads_E.sum()) == tokens * top_k
    assert largest.numel == tokens * experts
    # Past the router, which has to score every expert for every token: nothing beyond the pairs' own rows.
    gate_up = torch.randn(experts, 2 * width, dim, requires_grad=True)
    down = torch.randn(experts, dim, width, requires_grad=True)
    alpha_TK = routing.topk_weights_TK.detach()
    with Largest() as largest, lrmoe.recording() as calls:
        config = LRMoEConfig(drop=0.5)
        lrmoe.routed_experts(x, routing.topk_ids_TK, alpha_TK, gate_up, down, config=config).sum().backward()
    assert int(calls[0].load_E.sum()) == tokens * top_k
    assert largest.operations > 100
    assert largest.numel <= tokens * top_k * 2 * width


def test_case_53_the_instrument_sees_inside_the_operator() -> None:
    """The test above is worth nothing if the mode does not look into the library's operators: the pre-activations of
    all pairs are an intermediate of theirs alone."""
    problem = standard()
    with Largest() as largest:
        run(problem, LRMoEConfig(save="input"))
    assert largest.numel == 128 * 64
    assert not any(t.numel() == 128 * 64 for t in (problem.x_TD, problem.down_proj, problem.ids_TK))


class _Rows:
    """Counts the rows that go through grouped products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = self.largest_in_backward = 0
        self._side = "backward"
        for name in ("grouped_mm", "grouped_wgrad"):
            monkeypatch.setattr(compacted, name, self._counted(getattr(compacted, name)))
        monkeypatch.setattr(custom_ops, "forward_rows", self._as_forward(custom_ops.forward_rows))

    def _as_forward(self, forward_rows: Any) -> Any:
        def run_forward(*args: Any, **kwargs: Any) -> Any:
            self._side = "forward"
            try:
                return forward_rows(*args, **kwargs)
            finally:
                self._side = "backward"

        return run_forward

    def _counted(self, product: Any) -> Any:
        def count(a_MX: Tensor, b: Tensor, offs_E: Tensor) -> Any:
            setattr(self, self._side, getattr(self, self._side) + int(offs_E[-1]))
            if self._side == "backward":
                self.largest_in_backward = max(self.largest_in_backward, a_MX.shape[0])
            return product(a_MX, b, offs_E)

        return count


@pytest.mark.parametrize("router_grad", ["exact", "sum_rule"])
def test_case_N5_a_drop_is_of_the_expert_backward_alone(router_grad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """drop=0.75 is not a quarter of the memory or of the work: the forward runs all rows and saves the same bytes; of
    the backward's four products per pair a quarter of the rows is left, plus, with router_grad="exact", one product
    over the dropped ones."""
    problem = standard()
    pairs = problem.ids_TK.numel()
    counted = {}
    for drop in (0.0, 0.75):
        with monkeypatch.context() as patch:
            rows = _Rows(patch)
            sizes: list[int] = []

            def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(tensor.numel() * tensor.element_size())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                leaves = problem.leaves()
                out = lrmoe.routed_experts(
                    topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=drop, router_grad=router_grad), **leaves
                )
            out.backward(problem.grad_TD)
            counted[drop] = rows, sum(sizes)
    (full, full_bytes), (quarter, quarter_bytes) = counted[0.0], counted[0.75]
    assert quarter.forward == full.forward == 2 * pairs
    assert quarter_bytes == full_bytes
    assert full.backward == 4 * pairs
    extra = pairs * 3 // 4 if router_grad == "exact" else 0
    assert quarter.backward == pairs + extra
    assert full.largest_in_backward == pairs
    assert quarter.largest_in_backward == max(pairs // 4, extra)
    assert problem.x_TD.shape[1] == DIM
