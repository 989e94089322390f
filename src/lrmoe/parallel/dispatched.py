"""What one call of the distributed operator is about, handed from its forward to its backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lrmoe.experts.meter import Meter
from lrmoe.experts.recipe import Recipe
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout
from lrmoe.parallel.remainder import GradientSums
from lrmoe.parallel.stores.weight_store import WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Everything about one call that is no tensor with a gradient; the same on all ranks but for ``layout``.

    ``load_E``, ``quota_E``: int64, real pairs of all ranks for each expert and how many are kept; ``position``: (seed,
    step, layer, microbatch); ``train``: a backward may follow; ``recording``: somebody records it, on
    some rank; ``fingerprint``: of this rank's routing and of the position; ``masked``: some rank has masked tokens;
    ``sums``: what is exchanged for ``remainder="mean"``, None where nothing is; ``sequence_T``: int64, the number in
    [0, T) of the sequence of each of this rank's tokens, None where unknown.
    """

    layout: Layout
    exchange: Exchange
    store: WeightStore
    recipe: Recipe
    load_E: Tensor
    quota_E: Tensor
    position: tuple[int, int, int, int]
    gradient_divisor: float
    meter: Meter | None
    train: bool
    recording: bool
    fingerprint: Tensor
    masked: bool = False
    sums: GradientSums | None = None
    sequence_T: Tensor | None = None
