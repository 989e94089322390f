"""How much may be dropped at a given optimizer step."""

from __future__ import annotations

from lrmoe.config import LRMoEConfig


def drop_at(config: LRMoEConfig, step: int) -> float:
    """The drop in force at optimizer step ``step`` (0-based): warm-up, linear ramp, plateau, dense tail.

    A ramp of n steps reaches ``config.drop`` on its n-th step; the last ``final_dense_steps`` of ``total_steps``
    drop nothing.

    Raises:
        ValueError: if a dense tail is asked for and the length of the run is not known.
    """
    if config.final_dense_steps:
        if config.total_steps is None:
            raise ValueError(
                f"final_dense_steps={config.final_dense_steps} needs total_steps: set it in the config "
                "(the Trainer callback does so by itself)"
            )
        if step >= config.total_steps - config.final_dense_steps:
            return 0.0
    if step < config.warmup_steps:
        return 0.0
    into_ramp = step - config.warmup_steps + 1
    if into_ramp < config.ramp_steps:
        return config.drop * into_ramp / config.ramp_steps
    return config.drop
