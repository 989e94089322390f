"""TopKRouter against a loop over tokens in fp64, and the promises that a loop cannot show.

T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rounding import allowance
from torch import Tensor, nn

from lrmoe import Routing, TopKRouter
from lrmoe.routing import count_loads

T, D, E, K = 13, 8, 8, 2


def make(**options: Any) -> TopKRouter:
    return TopKRouter(**{"dim": D, "num_experts": E, "top_k": K, **options})


def route_logits(router: TopKRouter, logits_TE: Tensor, mask_T: Tensor | None = None) -> tuple[Routing, Tensor]:
    """The routing of given logits: an identity weight makes the input the logits. Also returns that input."""
    assert router.dim == router.num_experts
    with torch.no_grad():
        router.weight.copy_(torch.eye(router.dim))
    x_TE = logits_TE.clone().requires_grad_()
    return router(x_TE, mask_T), x_TE


def loop(router: TopKRouter, x_TD: Tensor, mask_T: Tensor | None = None) -> dict[str, Tensor]:
    """The router, one token after another, in fp64."""
    logits_TE = x_TD.double() @ router.weight.detach().double().T
    bias_E = torch.zeros(router.num_experts) if router.selection_bias is None else router.selection_bias
    ids, weights, probabilities, gaps = [], [], [], [torch.ones(1)]
    loads_E = torch.zeros(router.num_experts, dtype=torch.int64)
    for t, logits_E in enumerate(logits_TE):
        gates_E = logits_E.softmax(0) if router.gate == "softmax" else logits_E.sigmoid()
        rank = (gates_E + bias_E).tolist()
        # Without bias and groups the logits are compared, which do not saturate.
        compared = [rank] if router.selection_bias is not None or router.num_groups else [logits_E.tolist()]
        groups = router.num_groups or 1
        size = router.num_experts // groups
        allowed = range(router.num_experts)
        if groups > 1:
            scores = [sum(sorted(rank[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            best = sorted(range(groups), key=lambda g: (-scores[g], g))[: router.top_groups]
            compared.append(scores)
            allowed = [e for e in range(router.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: (-rank[e], e))[: router.top_k]
        gaps += [-torch.tensor(values).sort(descending=True).values.diff() for values in compared]
        alpha_K = gates_E[chosen]
        if router.normalize:
            alpha_K = alpha_K / alpha_K.sum()
        ids.append(chosen)
        weights.append(alpha_K * router.scale)
        if mask_T is None or mask_T[t]:
            probabilities.append(gates_E / gates_E.sum())
            loads_E[chosen] += 1
    share_E = loads_E.double() / loads_E.sum()
    real_TE = logits_TE if mask_T is None else logits_TE[mask_T]
    return {
        "ids": torch.tensor(ids),
        "weights": torch.stack(weights),
        "loads": loads_E,
        "balance": router.num_experts * (share_E * torch.stack(probabilities).mean(0)).sum(),
        "z": real_TE.logsumexp(-1).square().mean(),
        # How close any two of what is compared come: closer than rounding, and either order is right.
        "gap": torch.cat(gaps).min(),
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    gate=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    shape=st.sampled_from([(8, 2, None, None), (8, 8, None, None), (8, 3, 4, 2), (6, 2, 3, 1), (1, 1, None, None)]),
    selection_bias=st.booleans(),
    masked=st.booleans(),
)
def test_equals_the_loop(
    seed: int,
    gate: str,
    normalize: bool,
    scale: float,
    shape: tuple[int, int, int | None, int | None],
    selection_bias: bool,
    masked: bool,
) -> None:
    num_experts, top_k, num_groups, top_groups = shape
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = TopKRouter(
            dim=D,
            num_experts=num_experts,
            top_k=top_k,
            gate=gate,
            normalize=normalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
            selection_bias=selection_bias,
            balance_loss_weight=0.1,
            z_loss_weight=0.01,
        )
    with torch.no_grad():
        router.weight.copy_(torch.randn(num_experts, D, generator=generator))
        if router.selection_bias is not None:
            router.selection_bias.copy_(0.2 * torch.randn(num_experts, generator=generator))
    x_TD = torch.randn(T, D, generator=generator)
    mask_T = (torch.arange(T) % 3 != 1) if masked else None

    routing = router(x_TD, mask_T)
    expected = loop(router, x_TD, mask_T)
    assume(expected["gap"] > 4 * allowance(torch.float32, D))

    assert torch.equal(routing.topk_ids_TK, expected["ids"])
    assert routing.topk_ids_TK.dtype == torch.int64
    assert routing.topk_weights_TK.dtype == torch.float32
    torch.testing.assert_close(routing.topk_weights_TK.double(), expected["weights"], rtol=2e-6, atol=1e-7)
    assert torch.equal(routing.loads_E, expected["loads"])
    assert routing.loads_E.dtype == torch.int64
    torch.testing.assert_close(routing.balance_loss.double(), expected["balance"], rtol=1e-5, atol=0)
    torch.testing.assert_close(routing.z_loss.double(), expected["z"], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        routing.aux_loss.double(), 0.1 * expected["balance"] + 0.01 * expected["z"], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_the_formula(gate: str, normalize: bool) -> None:
    router = make(gate=gate, normalize=normalize, scale=1.5, balance_loss_weight=0.3, z_loss_weight=0.2).double()
    x_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)

    def f(x_TD: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        routing = torch.func.functional_call(router, {"weight": weight}, (x_TD,))
        return routing.topk_weights_TK, routing.aux_loss

    assert torch.autograd.gradcheck(f, (x_TD, router.weight))


def test_balance_loss_is_one_when_uniform_and_num_experts_when_collapsed() -> None:
    router = TopKRouter(dim=E, num_experts=E, top_k=1, normalize=False, balance_loss_weight=1.0)
    spread = 1e-4 * torch.eye(E)  # token t prefers expert t, all but uniformly
    assert route_logits(router, spread)[0].balance_loss.item() == pytest.approx(1.0, abs=1e-4)
    collapsed = torch.zeros(E, E)
    collapsed[:, 3] = 50.0
    assert route_logits(router, collapsed)[0].balance_loss.item() == pytest.approx(E)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [{}, {"selection_bias": True}, {"num_groups": 4, "top_groups": 2}])
def test_ties_go_to_the_lowest_id(gate: str, options: dict[str, Any]) -> None:
    router = TopKRouter(dim=64, num_experts=64, top_k=6, gate=gate, **options)
    routing, _ = route_logits(router, torch.zeros(50, 64))
    assert torch.equal(routing.topk_ids_TK, torch.arange(6).expand(50, 6))


def test_rounding_of_a_gate_makes_no_tie() -> None:
    # Both gates are exactly 1.0 in fp32.
    routing, _ = route_logits(
        TopKRouter(dim=E, num_experts=E, top_k=1, gate="sigmoid", normalize=False),
        torch.tensor([[-9.0, 30.0, 40.0, 0.0, 0.0, 0.0, 0.0, 0.0]]),
    )
    assert routing.topk_ids_TK.item() == 2


def test_groups_limit_the_choice() -> None:
    router = TopKRouter(dim=8, num_experts=8, top_k=2, gate="sigmoid", num_groups=4, top_groups=1)
    # Expert 0 is the best of all, but its neighbour is so bad that the pair (4, 5) is the better group.
    logits = torch.tensor([[3.0, -9.0, 0.0, 0.0, 1.0, 2.0, -1.0, 0.0]])
    routing, _ = route_logits(router, logits)
    assert routing.topk_ids_TK.tolist() == [[5, 4]]


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    router = TopKRouter(dim=4, num_experts=4, top_k=2, gate="sigmoid", selection_bias=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    router.selection_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    routing, _ = route_logits(router, logits)
    assert routing.topk_ids_TK.tolist() == [[3, 0]]
    gates = torch.sigmoid(torch.tensor([-1.0, 2.0]))
    torch.testing.assert_close(routing.topk_weights_TK[0], gates / gates.sum())


def test_selection_bias_moves_against_the_load() -> None:
    router = make(num_experts=4, selection_bias=True, bias_update_rate=0.01)
    router.update_selection_bias(torch.tensor([10, 0, 5, 5]))
    torch.testing.assert_close(router.selection_bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]), rtol=0, atol=0)
    router.update_selection_bias(torch.tensor([1, 1, 1, 1]))
    torch.testing.assert_close(router.selection_bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"loads_E has shape \(3,\); it must be \(4,\)"):
        router.update_selection_bias(torch.tensor([1, 2, 3]))


def test_selection_bias_balances_a_skewed_router() -> None:
    router = make(num_experts=E, gate="sigmoid", selection_bias=True, bias_update_rate=0.02)
    x_TD = torch.randn(256, D) + 1.0  # a common component prefers some experts
    with torch.no_grad():
        skewed = router(x_TD).loads_E
        for _ in range(100):
            router.update_selection_bias(router(x_TD).loads_E)
        balanced = router(x_TD).loads_E
    assert skewed.max() > 2 * skewed.float().mean()
    assert balanced.max() < 1.3 * balanced.float().mean()


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_casts_leave_the_selection_bias_alone(cast: Any) -> None:
    model = nn.Sequential(make(selection_bias=True))
    bias_E = 0.5 + 1e-6 * torch.arange(E)  # bf16 would collapse it to 0.5
    model[0].selection_bias.copy_(bias_E)
    cast(model)
    assert model[0].weight.dtype in (torch.bfloat16, torch.float16)
    assert model[0].selection_bias.dtype == torch.float32
    assert torch.equal(model[0].selection_bias, bias_E)
    assert torch.equal(model.state_dict()["0.selection_bias"], bias_E)
    model.float()
    assert torch.equal(model[0].selection_bias, bias_E)


def test_selection_bias_follows_the_device_and_is_saved() -> None:
    router = make(selection_bias=True).to(device="meta", dtype=torch.bfloat16)
    assert router.selection_bias.device.type == "meta"
    assert router.selection_bias.dtype == torch.float32
    real = router.to_empty(device="cpu")
    real.reset_parameters()
    assert torch.equal(real.selection_bias, torch.zeros(E))
    assert set(real.state_dict()) == {"weight", "selection_bias"}
    assert set(make().state_dict()) == {"weight"}
    with pytest.raises(RuntimeError, match="selection_bias"):
        make().load_state_dict(real.state_dict())
    with pytest.raises(RuntimeError, match="selection_bias"):
        make(selection_bias=True).load_state_dict(make().state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_model_routes_in_fp32(dtype: torch.dtype) -> None:
    router = TopKRouter(dim=64, num_experts=128, top_k=8).to(dtype)
    x_TD = (0.05 * torch.randn(256, 64)).to(dtype).requires_grad_()
    routing = router(x_TD)
    exact = TopKRouter(dim=64, num_experts=128, top_k=8)
    exact.weight.data = router.weight.data.float()
    expected = exact(x_TD.detach().float())
    assert torch.equal(routing.logits_TE, expected.logits_TE)
    assert torch.equal(routing.topk_ids_TK, expected.topk_ids_TK)
    # What would have happened with gates rounded first: other experts, so the test can fail.
    rounded = routing.logits_TE.softmax(-1).to(dtype).float()
    assert not torch.equal(rounded.topk(8).indices.sort(-1).values, routing.topk_ids_TK.sort(-1).values)
    assert routing.topk_weights_TK.dtype == torch.float32
    routing.topk_weights_TK[:, 0].sum().backward()
    assert router.weight.grad.dtype == dtype
    assert x_TD.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_router(dtype: torch.dtype) -> None:
    router = make(balance_loss_weight=0.1)
    x_TD = torch.randn(T, D)
    expected = router(x_TD)
    expected.topk_weights_TK[:, 0].sum().backward()
    expected_grad, router.weight.grad = router.weight.grad, None
    with torch.autocast("cpu", dtype=dtype):
        routing = router(x_TD)
        routing.topk_weights_TK[:, 0].sum().backward()
    assert torch.equal(routing.logits_TE, expected.logits_TE)
    assert torch.equal(routing.topk_weights_TK, expected.topk_weights_TK)
    assert torch.equal(routing.aux_loss, expected.aux_loss)
    assert torch.equal(router.weight.grad, expected_grad)


def test_only_the_operands_are_kept_for_the_backward_of_the_logits() -> None:
    router = TopKRouter(dim=256, num_experts=4, top_k=2).bfloat16()
    x_TD = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    wide: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (wide.append(t) if t.shape[-1] == 256 else None, t)[1], lambda t: t
    ):
        router(x_TD)
    assert {t.data_ptr() for t in wide} == {x_TD.data_ptr(), router.weight.data_ptr()}


@pytest.mark.parametrize(("logit", "dtype"), [(-120.0, torch.bfloat16), (-20.0, torch.float16), (-5e4, torch.float16)])
@pytest.mark.parametrize("selection_bias", [False, True])
def test_gates_that_underflow_give_finite_weights(logit: float, dtype: torch.dtype, selection_bias: bool) -> None:
    router = TopKRouter(dim=E, num_experts=E, top_k=2, gate="sigmoid", selection_bias=selection_bias)
    if selection_bias:
        router.selection_bias.copy_(torch.arange(E) * 3.0)  # larger than any gate
    logits_TE = torch.randn(64, E)
    alone, _ = route_logits(copy.deepcopy(router), logits_TE.to(dtype))
    logits_TE[17] = logit
    routing, x_TE = route_logits(router.to(dtype), logits_TE.to(dtype))
    assert routing.topk_weights_TK[17].tolist() == [0.5, 0.5]
    others = torch.arange(64) != 17
    assert torch.equal(routing.topk_weights_TK[others], alone.topk_weights_TK[others])
    (routing.topk_weights_TK[:, 0] * torch.randn(64)).sum().backward()
    assert x_TE.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()
    assert x_TE.grad[others].abs().sum() > 0


def test_small_gates_are_not_outweighed_by_an_epsilon() -> None:
    router = TopKRouter(dim=E, num_experts=E, top_k=2, gate="sigmoid")
    logits_TE = torch.full((1, E), -200.0)
    logits_TE[0, 2], logits_TE[0, 5] = -60.0, -60.0 - math.log(3.0)
    routing, _ = route_logits(router, logits_TE)
    torch.testing.assert_close(routing.topk_weights_TK, torch.tensor([[0.75, 0.25]]), rtol=1e-5, atol=0)


def test_nan_stays_visible() -> None:
    logits_TE = torch.zeros(3, E)
    logits_TE[1, 4] = math.nan
    routing, _ = route_logits(TopKRouter(dim=E, num_experts=E, top_k=2), logits_TE)
    assert routing.topk_weights_TK[1].isnan().all()
    assert routing.topk_weights_TK[[0, 2]].isfinite().all()


def test_masked_tokens_are_routed_but_not_counted() -> None:
    router = make(balance_loss_weight=0.1, z_loss_weight=0.1)
    real, padding = torch.randn(5, D), torch.ones(11, D).mul(3)
    mask_T = torch.arange(16) < 5
    routing = router(torch.cat([real, padding]), mask_T)
    expected = router(real)
    assert torch.equal(routing.loads_E, expected.loads_E)
    assert routing.loads_E.sum() == 5 * K
    torch.testing.assert_close(routing.aux_loss, expected.aux_loss)
    # Products over 16 rows and over 5: the difference of two logits, and so the logarithm of a weight, is off by twice
    # what one is off by.
    magnitude = (real.abs() @ router.weight.abs().T).max().item()
    torch.testing.assert_close(
        routing.topk_weights_TK[:5], expected.topk_weights_TK, rtol=2 * allowance(torch.float32, D) * magnitude, atol=0
    )
    assert routing.topk_weights_TK[5:].sum() > 0


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_real_token_at_all(num_tokens: int) -> None:
    router = make(balance_loss_weight=0.1, z_loss_weight=0.1, num_groups=2, top_groups=1)
    routing = router(torch.randn(num_tokens, D), torch.zeros(num_tokens, dtype=torch.bool))
    assert routing.topk_ids_TK.shape == (num_tokens, K)
    assert routing.loads_E.tolist() == [0] * E
    assert routing.aux_loss.item() == 0.0
    routing.aux_loss.backward()
    assert torch.equal(router.weight.grad, torch.zeros(E, D))


def test_k_equals_e_and_one_expert() -> None:
    assert make(num_experts=4, top_k=4)(torch.randn(T, D)).loads_E.tolist() == [T] * 4
    with pytest.warns(UserWarning, match="the router gets no gradient"):
        single = make(num_experts=1, top_k=1)
    assert single(torch.randn(T, D)).loads_E.tolist() == [T]
    assert make(num_experts=512, top_k=10)(torch.randn(T, D)).loads_E.sum() == 10 * T


def test_k1_with_normalisation_is_one_and_says_so() -> None:
    with pytest.warns(UserWarning, match="top_k=1 with normalize=True") as record:
        router = make(top_k=1)
    assert len(record) == 1
    routing = router(torch.randn(T, D))
    assert torch.equal(routing.topk_weights_TK, torch.ones(T, 1))
    (routing.topk_weights_TK * torch.randn(T, 1)).sum().backward()
    assert router.weight.grad.abs().max() < 1e-7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = make(top_k=1, normalize=False)
    free(torch.randn(T, D)).topk_weights_TK.sum().backward()
    assert free.weight.grad.abs().max() > 1e-4


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=20))
@settings(max_examples=50, deadline=None)
def test_loads_equal_bincount(rows: list[tuple[int, int, bool]]) -> None:
    ids_TK = torch.tensor([[a, b] for a, b, _ in rows], dtype=torch.int64).reshape(-1, 2)
    mask_T = torch.tensor([m for _, _, m in rows], dtype=torch.bool)
    assert torch.equal(count_loads(ids_TK, 5), torch.bincount(ids_TK.flatten(), minlength=5))
    assert torch.equal(count_loads(ids_TK, 5, mask_T), torch.bincount(ids_TK[mask_T].flatten(), minlength=5))


def test_no_tensor_of_tokens_times_choices_times_experts() -> None:
    tokens, choices, experts = 131072, 8, 128
    router = TopKRouter(dim=16, num_experts=experts, top_k=choices, balance_loss_weight=0.1, device="meta")
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            sizes.extend(o.numel() for o in outputs if isinstance(o, Tensor))
            return out

    with Largest():
        router(torch.empty(tokens, 16, device="meta")).aux_loss.backward()
    assert max(sizes) == tokens * experts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k=9 must be at most num_experts=8"),
        ({"top_k": 0}, "top_k=0 must be an integer >= 1"),
        ({"dim": 0}, "dim=0 must be an integer >= 1"),
        ({"num_experts": 2.0}, "num_experts=2.0 must be an integer >= 1"),
        ({"gate": "tanh"}, "gate='tanh' is not known; choose one of softmax, sigmoid"),
        ({"scale": 0.0}, "scale=0.0 must be a finite number > 0"),
        ({"scale": math.nan}, "scale=nan must be"),
        ({"bias_update_rate": -1.0}, "bias_update_rate=-1.0 must be a finite number >= 0"),
        ({"balance_loss_weight": math.inf}, "balance_loss_weight=inf must be"),
        ({"z_loss_weight": -0.1}, "z_loss_weight=-0.1 must be"),
        ({"num_groups": 2}, "num_groups=2 and top_groups=None must be set together"),
        ({"num_groups": 3, "top_groups": 1}, "num_groups=3 must divide num_experts=8"),
        ({"num_groups": 8, "top_groups": 2}, "use at most num_experts/2 = 4 groups"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3 must be at most num_groups=2"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "set top_groups to at least 2"),
        ({"num_groups": 4, "top_groups": 0}, "top_groups=0 must be an integer >= 1"),
    ],
)
def test_bad_options_name_field_and_mend(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make(**options)


def test_bad_inputs_name_what_is_wrong() -> None:
    router = make()
    with pytest.raises(ValueError, match=r"x_TD has shape \(4, 7\)"):
        router(torch.randn(4, 7))
    with pytest.raises(ValueError, match=r"token_mask has dtype torch.int64; it must be torch.bool"):
        router(torch.randn(4, D), torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\); it must be \(4,\)"):
        router(torch.randn(4, D), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("options", [{}, {"selection_bias": True, "gate": "sigmoid", "num_groups": 4, "top_groups": 2}])
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    router = make(balance_loss_weight=0.1, z_loss_weight=0.1, **options)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (7, 12):
        x_TD = torch.randn(num_tokens, D)
        expected, routing = router(x_TD), compiled(x_TD)
        assert torch.equal(routing.topk_ids_TK, expected.topk_ids_TK)
        torch.testing.assert_close(routing.topk_weights_TK, expected.topk_weights_TK)
        torch.testing.assert_close(routing.aux_loss, expected.aux_loss)
        if router.selection_bias is not None:
            router.update_selection_bias(expected.loads_E)
