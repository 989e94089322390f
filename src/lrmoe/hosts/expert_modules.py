"""What Transformers' expert modules look like, and which of them LRMoE can run.

Transformers decorates the experts of its MoE models with ``use_experts_implementation``. The decorated classes differ
in layout (transposed, interleaved, biased) and in the gate; this file reads both off a module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lrmoe.experts.stored_weights import whole_shape, why_unusable
from lrmoe.ops import activations

# An instance of a class decorated with `use_experts_implementation`; what it has is known by its attributes alone.
Experts = Any

# Where an expert module keeps what brings it its tokens under expert parallelism, if that is this library.
EXPERT_PARALLEL = "_lrmoe_expert_parallel"

_DECORATED = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_is_expert_parallel")
_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def is_experts(module: nn.Module) -> bool:
    """Whether the module was built from a class decorated with ``use_experts_implementation``."""
    # The instance's own attributes: wrappers (torch.compile, adapters) hand on those of what they wrap.
    return all(name in vars(module) for name in _DECORATED)


def why_not(module: Experts) -> str | None:
    """Why an expert module cannot be recalibrated, and what to do; None if it can."""
    kind = type(module).__name__
    if not module.has_gate:
        return f"{kind} has no gate (has_gate=False); only gated experts (gate_up_proj, down_proj) are supported"
    if getattr(module, "has_post_expert_norm", False):
        return f"{kind} normalises each expert's output (has_post_expert_norm=True), which is not supported"
    missing = [name for name in _WEIGHTS if getattr(module, name, None) is None]
    if missing:
        return f"{kind} has no {' and no '.join(missing)}; only experts with both as 3-d parameters are supported"
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (*_WEIGHTS, *(_BIASES if module.has_bias else ())):
        weight = getattr(module, name)
        if problem := why_unusable(weight):
            return f"{name} of {kind} {problem}"
        if name in _BIASES:
            continue
        # A weight whose shape nobody knows now shows it when a forward has gathered it.
        shape = whole_shape(weight)
        if shape is not None and len(shape) != 3:
            return f"{name} of {kind} has shape {shape}; it must be 3-d, (experts, rows, columns)"
        if sharded := _sharded_inside_experts(weight):
            return (
                f"{name} of {kind} is sharded inside each expert ({sharded}), so no rank sees a whole phi and the "
                "ranks would keep different pairs; use expert parallelism (ep_size) instead of tensor parallelism"
            )
        if shape is not None:
            shapes[name] = shape
    return _shape_mismatch(module, *shapes.values()) if len(shapes) == len(_WEIGHTS) else None


def _shape_mismatch(module: Experts, gate_up: tuple[int, ...], down: tuple[int, ...]) -> str | None:
    """Why the two projections, of these shapes, do not fit each other, or None if they do."""
    if module.is_transposed:
        gate_up, down = ((experts, rows, columns) for experts, columns, rows in (gate_up, down))
    experts, twice, dim = gate_up
    if down == (experts, dim, twice // 2) and twice % 2 == 0:
        return None
    return (
        f"gate_up_proj {gate_up} and down_proj {down} of {type(module).__name__} do not fit: "
        "expected (E, 2F, D) and (E, D, F), or both transposed with is_transposed=True"
    )


def weights(module: Experts) -> tuple[Tensor, Tensor]:
    """``gate_up_proj (E, 2F, D)`` and ``down_proj (E, D, F)``; views where the module stores them transposed."""
    if module.is_transposed:
        return module.gate_up_proj.transpose(1, 2), module.down_proj.transpose(1, 2)
    return module.gate_up_proj, module.down_proj


def activation_of(module: Experts) -> str:
    """The name, in :mod:`lrmoe.ops.activations`, of what the module's ``_apply_gate`` computes.

    Found by comparing numbers rather than class names: a class may override the gate, and the same class may take its
    activation from the config.

    Raises:
        ValueError: naming the class, if none of the closed forms gives the module's numbers.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = torch.randn(64, 16, generator=generator, dtype=torch.float32, device="cpu")
    limits = [limit for _, limit in _clamps(module)]
    # Half of the rows reach beyond every clamp.
    sample[32:] *= 2.0 * max([4.0, *limits])
    with torch.no_grad():
        expected = module._apply_gate(sample.clone())
        for name in _candidates(module):
            activation = activations.get(name)
            found = activation.forward(*activation.split(sample))
            if found.shape == expected.shape and torch.allclose(found, expected.to(found.dtype), rtol=1e-5, atol=1e-6):
                return name
    raise ValueError(
        f"the gate of {type(module).__name__} (its _apply_gate, act_fn={_act_name(module)}) is none of the forms LRMoE "
        "knows the derivative of: silu, gelu, gelu_tanh or relu times up, or gpt-oss's clamped swiglu; train this "
        'model with another experts_implementation, e.g. "grouped_mm"'
    )


def gate_of(module: Experts) -> tuple[Any, ...]:
    """What a module's gate computes with; equal as long as that is the same."""
    return getattr(module, "act_fn", None), *_clamps(module)


def _candidates(module: Experts) -> list[str]:
    names = ["silu", "gelu", "gelu_tanh", "relu"]
    names += [f"clamped_swiglu(alpha={alpha!r},limit={limit!r})" for alpha, limit in _clamps(module)]
    return [*names, *(f"{name}|interleaved" for name in names)]


def _clamps(module: Experts) -> list[tuple[float, float]]:
    """The (alpha, limit) a clamped gate may use: from the module, else from its config."""
    named = [(module, "alpha", "limit"), (module, "swiglu_alpha", "swiglu_limit")]
    named.append((module.config, "swiglu_alpha", "swiglu_limit"))
    pairs = [(getattr(owner, alpha, None), getattr(owner, limit, None)) for owner, alpha, limit in named]
    return list(dict.fromkeys((float(a), float(b)) for a, b in pairs if a is not None and b is not None))


def _act_name(module: Experts) -> str:
    act = getattr(module, "act_fn", None)
    return getattr(act, "__name__", type(act).__name__)


def _sharded_inside_experts(weight: Tensor) -> str | None:
    placements = getattr(weight, "placements", None)
    if placements is None:
        return None
    inside = [str(p) for p in placements if getattr(p, "dim", None) is not None and p.dim % weight.dim() != 0]
    return ", ".join(inside) or None
