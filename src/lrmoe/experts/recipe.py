"""What the operator reads of a configuration, and its text, which the operator's schema can hold."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from lrmoe.config import LRMoEConfig, Metric, Quota, Remainder, RouterGrad, Save, Selector


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The parts of the configuration that the operator reads."""

    activation: str
    selector: Selector
    metric: Metric
    quota: Quota
    router_grad: RouterGrad
    save: Save
    remainder: Remainder
    error_budget: float | None

    @classmethod
    def of(cls, config: LRMoEConfig, activation: str) -> Recipe:
        """The recipe of a configuration."""
        return cls(
            activation=activation,
            selector=config.selector,
            metric=config.metric,
            quota=config.quota,
            router_grad=config.router_grad,
            save=config.save,
            remainder=config.remainder,
            error_budget=config.error_budget,
        )


def recipe_text(config: LRMoEConfig, activation: str, *, biases: tuple[bool, bool]) -> str:
    """What :func:`parse_recipe` reads: the recipe's values in the order of its fields, none of which holds a blank, and
    whether there are biases of the up and of the down projection. From the configuration itself, so that torch.compile,
    which traces this, sees names and one number."""
    return (
        f"{activation} {config.selector} {config.metric} {config.quota} {config.router_grad} {config.save} "
        f"{config.remainder} {config.error_budget} {biases[0]} {biases[1]}"
    )


@functools.lru_cache(maxsize=256)
def parse_recipe(text: str) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe, and the names of the experts' weights in the order in which the operator takes them."""
    *values, budget, gate_up_bias, down_bias = text.split(" ")
    named = dict(zip((field.name for field in fields(Recipe)), values, strict=False))
    # LRMoEConfig has checked the names.
    recipe = Recipe(error_budget=None if budget == "None" else float(budget), **named)  # type: ignore[arg-type]
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return recipe, ("gate_up_proj", "down_proj", *(name for name, there in biases.items() if there == "True"))
