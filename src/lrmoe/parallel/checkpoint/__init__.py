"""Checkpoints by expert: saved from any number of ranks, loaded on any other.

    state = {"model": model, "optimizer": optimizer, "recalibrator": recal, "policy": ep.policy, "group": ep.group}
    checkpoint.save("run/checkpoints", step=step, **state)
    ...
    last = checkpoint.newest("run/checkpoints")
    if last is not None:
        step = checkpoint.load(last, **state).step

Files are torch.distributed.checkpoint's. A tensor that all ranks share has one key; a parameter marked as experts has
one for each expert, by global id, and so have the optimizer's moments. Replicas of experts are no state and are not
saved. DTensors are saved by their own mesh; marked experts that FSDP2 shards further are put together first, in memory.
A checkpoint appears in the folder when all ranks have written their part, and not before.
"""

from lrmoe.parallel.checkpoint.folder import newest
from lrmoe.parallel.checkpoint.save_load import CheckpointError, Loaded, load, save

__all__ = ["CheckpointError", "Loaded", "load", "newest", "save"]
