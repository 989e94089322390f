"""Which forward a recompute repeats.

Activation checkpointing runs a region of the model again in the middle of a backward, when other forwards may have
come in between. Torch keeps an object for each region that it checkpoints without reentering autograd, and both the
forward and its recompute run under hooks that refer to it: it is the thread from one to the other.
"""

from __future__ import annotations

import inspect
import weakref

import torch


def in_backward() -> bool:
    """Whether a backward is running: what then runs forward, with gradients, is a recompute."""
    return torch._C._current_graph_task_id() != -1


def region() -> object | None:
    """The checkpointed region that the caller runs in, the same in the forward and in its recompute; None outside, in
    the reentrant kind, and under a torch that keeps it elsewhere."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    pack = inspect.unwrap(hooks[0])
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(pack, "__closure__", None) or (), strict=False):
        if name == "frame":
            return cell.cell_contents  # type: ignore[no-any-return]
        if name == "target_frame_ref" and isinstance(cell.cell_contents, weakref.ref):
            return cell.cell_contents()
    return None
