"""The calls of an attached model: which of them are microbatches, and with which tokens each of its parts was called.

Two invariants hold here, which docs/transformers.md states for users:

1. A forward that is trained on runs inside a call of the model, or of a part of it that takes tokens, which gave it a
   microbatch of its own.
2. A padding mask speaks of the tokens of the call that brought it, and ends with that call.

B sequences, S tokens each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lrmoe.experts.layer_control import Call, Clock
from lrmoe.experts.recompute import in_backward, region
from lrmoe.experts.tokens import SHAPE, Tokens
from lrmoe.labels import layer_in_words
from lrmoe.once import Once

_MASK = "attention_mask"
_TOKENS = ("input_ids", "inputs_embeds")
# Tensors of shape (B, S, ...) that go with the tokens and are none themselves.
_BESIDE = (
    *(_MASK, *_TOKENS, "labels", "position_ids", "token_type_ids", "mm_token_type_ids", "segment_ids", "document_ids"),
    *("loss_mask", "special_tokens_mask", "encoder_hidden_states", "encoder_attention_mask"),
)


class CallFollower:
    """Keeps a clock's ``calls`` by hooks on a model and on those parts of it that take a mask of their own.

    Args:
        model: what :func:`lrmoe.attach` was given.
        clock: of its layers.
        layers: its attached modules.
        before: called with whether it is trained on, before each forward with gradients; what it raises stops the
            forward.

    Attributes:
        handles: of the hooks.
    """

    def __init__(
        self, model: nn.Module, clock: Clock, layers: Iterable[nn.Module], before: Callable[[bool], None]
    ) -> None:
        self._model = model
        self._clock = clock
        self._layers = list(layers)
        self._before = before
        self._once = Once()
        clock.outside, clock.unclear = self._say_outside, self._say_unclear
        self.handles: list[Any] = []
        for module in _parts(model, self._layers):
            part = _Part(self, module)
            self.handles.append(module.register_forward_pre_hook(part.begin, with_kwargs=True))
            self.handles.append(module.register_forward_hook(part.end, always_call=True))

    def begin(self, module: nn.Module, named: Mapping[str, Any]) -> None:
        """A call of the model or of a part of it begins, with these arguments."""
        clock, outer = self._clock, self._clock.calls
        trains = torch.is_grad_enabled() and any(layer.training for layer in self._layers)
        counts = trains and not outer
        replays = not torch.compiler.is_compiling() and in_backward()
        if not outer and not replays and torch.is_grad_enabled():
            self._before(trains)
        # A recompute repeats a microbatch, but for a reentrant one of the whole call, of which nothing was counted.
        if counts and (clock.followed or (replays and (region() is not None or clock.awaits_recompute))):
            counts = False
        if counts:
            clock.next_microbatch()
        around = outer[-1].tokens if outer else None
        outer.append(Call(module, read_tokens(named, around) if trains else None, counts=counts))

    def end(self, module: nn.Module) -> None:
        """It ends, or has been stopped."""
        calls = self._clock.calls
        # Where another hook has stopped the call before it began here, it is not there.
        if calls and calls[-1].module is module:
            calls.pop()

    def _say_outside(self, layer: str) -> None:
        self._once.warn(
            "outside",
            f"{layer_in_words(layer)} was trained without a call of the {type(self._model).__name__} that "
            "attach() was given, so the microbatches of a step share one draw and padding masks are not seen; attach "
            "to the module that you call (with adapters: to the adapted model), and call it, not its forward",
        )

    def _say_unclear(self, layer: str, reason: str) -> None:
        self._once.warn(
            reason,
            f"{layer_in_words(layer)} does not use the {_MASK} of this call: {reason}. Padding then counts in "
            "its loads and quotas; hand the layer its own mask, moe(x, token_mask=...)",
        )


class _Part:
    """The hooks of one module. An object, not closures: a model must stay picklable."""

    def __init__(self, follower: CallFollower, module: nn.Module) -> None:
        self._follower = follower
        parameters = inspect.signature(module.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [*self._names, *(f"argument {place}" for place in range(len(self._names), len(args)))]
        self._follower.begin(module, {**dict(zip(names, args, strict=False)), **kwargs})

    def end(self, module: nn.Module, *_: Any) -> None:
        self._follower.end(module)


def read_tokens(named: Mapping[str, Any], outer: Tokens | None) -> Tokens | None:
    """The tokens of a call, from its arguments by name, in their order; ``outer``: those of the call around it.

    A call that brings tokens, integers or ``inputs_embeds``, has its own, and a mask of them only if it brings one. One
    that is handed features alone works on the tokens of the call around it, unless it brings a mask.
    """
    name, tokens = _find_tokens(named)
    mask = named.get(_MASK)
    flat_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return outer
    shape = (tokens.shape[0], tokens.shape[1])
    position = named.get("position_ids")
    # Of other shapes are those of several axes, and one row for all sequences.
    position_BS = position if isinstance(position, Tensor) and tuple(position.shape) == shape else None
    if flat_mask and isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        several = _several(named, name, shape)
        return Tokens(shape, mask.bool(), device=mask.device, position_BS=position_BS, several=several)
    if tokens.is_floating_point() and not flat_mask and (name != "inputs_embeds" or mask is not None):
        return outer
    doubt = SHAPE.format(mask=tuple(mask.shape), tokens=shape) if flat_mask and isinstance(mask, Tensor) else None
    return Tokens(shape, None, device=tokens.device, position_BS=position_BS, doubt=doubt)


def _find_tokens(named: Mapping[str, Any]) -> tuple[str | None, Any]:
    for name in _TOKENS:
        if named.get(name) is not None:
            return name, named[name]
    return next(iter(named.items()), (None, None))


def _several(named: Mapping[str, Any], own: str | None, shape: tuple[int, int]) -> bool:
    """Whether the call brings a second stream of tokens, which the mask may speak of."""
    return any(
        name != own and name not in _BESIDE and (name.startswith("decoder_") or tuple(value.shape[:2]) == shape)
        for name, value in named.items()
        if isinstance(value, Tensor) and value.dim() >= 2
    )


def _parts(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """The model, and the modules in it that hold attached layers and take a mask."""
    wanted = set(layers)
    found = [model]
    for module in model.modules():
        if module is model or module in wanted or wanted.isdisjoint(module.modules()):
            continue
        if _MASK in inspect.signature(module.forward).parameters:
            found.append(module)
    return found
