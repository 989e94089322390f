"""The padding mask a model was called with, read off the arguments of the call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def place_of_mask(model: nn.Module) -> int | None:
    """Where ``attention_mask`` stands among the positional arguments of the model's forward."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names.index("attention_mask") if "attention_mask" in names else None


def padding_mask(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | None) -> torch.Tensor | None:
    """The (B*S,) mask of real tokens from a (B, S) ``attention_mask`` that matches the tokens of this call."""
    mask = kwargs.get("attention_mask")
    if mask is None and place is not None and place < len(args):
        mask = args[place]
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    tokens = args[0] if tokens is None and args else tokens
    if not isinstance(mask, torch.Tensor) or not isinstance(tokens, torch.Tensor):
        return None
    if mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        return None
    return mask.bool().reshape(-1)
