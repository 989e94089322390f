"""How a layer is called where people read of it. In keys it keeps its module's name, the empty one of a model that is
itself the layer included."""

from __future__ import annotations


def layer_label(name: str) -> str:
    """A layer in lists and tables."""
    return name or "the model itself"


def layer_in_words(name: str) -> str:
    """A layer as errors and warnings begin with it."""
    return f"layer {name or 'of this model'}"
