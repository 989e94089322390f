"""Loads of a model that is planned for on paper: a trace's, a file's, or synthetic ones that say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lrmoe.cluster import ModelShape
from lrmoe.config import require_count
from lrmoe.studies.loads import read_loads, scaled_loads, skewed_loads
from lrmoe.studies.routing import Routing, recorded
from lrmoe.studies.sources import check_one_source


def routing_for(
    model: ModelShape,
    *,
    ranks: int,
    tokens: int,
    trace: str | None = None,
    loads: str | None = None,
    skew: float | None = None,
    seed: int = 0,
    draws: int = 1,
    steps: int | None = None,
) -> Routing:
    """Records of one or several layers, each scaled to a mean of ``tokens`` tokens a rank.

    Args:
        ranks: to deal a trace, or one load an expert, out over; a matrix in a file must have as many.
        trace, loads, skew: one of them at most; without any a skew of 2, on one rank 1.
        seed, draws: of synthetic loads: as many matrices, each as a layer of its own, from this seed on.
        steps: of a trace the first so many.

    Raises:
        ValueError: if more than one is given, a file cannot be used, or it is of another number of experts.
    """
    check_one_source(trace=trace, loads=loads, skew=skew)
    if trace is not None:
        return _scaled(recorded(Path(trace), ranks=ranks, steps=steps), model, tokens, trace)
    if steps is not None:
        raise ValueError(f"steps={steps!r} is of a trace; leave it out without one")
    if loads is not None:
        matrices = read_loads(Path(loads), ranks)
        source, synthetic = loads, False
    else:
        skew = min(2.0, ranks) if skew is None else skew
        sizes = {"num_experts": model.num_experts, "num_ranks": ranks, "tokens": tokens, "top_k": model.top_k}
        matrices = [
            skewed_loads(skew, seed=require_count("seed", seed) + draw, **sizes)
            for draw in range(require_count("draws", draws, least=1))
        ]
        source, synthetic = f"synthetic, busiest over mean rank {skew:g}", True
        source += f", {draws} draws from seed {seed} on" if draws > 1 else f", seed {seed}"
    count = len(matrices)
    routing = Routing(
        source=source,
        synthetic=synthetic,
        lam=matrices,
        step=[0] * count,
        microbatch=[0] * count,
        layer=list(range(count)),
        layers=[f"{'draw' if synthetic else 'matrix'} {i}" for i in range(count)],
    )
    return _scaled(routing, model, tokens, source)


def _scaled(routing: Routing, model: ModelShape, tokens: int, where: str) -> Routing:
    _, _, experts = routing.shape
    if experts != model.num_experts:
        raise ValueError(
            f"{where} holds loads of {experts} experts, but {model.name} has {model.num_experts} a layer; give loads "
            f"of this model, or a model with {experts}"
        )
    if not all(int(lam_GE.sum()) for lam_GE in routing.lam):
        raise ValueError(f"{where} holds a record without any pair; there is nothing to plan for")
    return replace(routing, lam=[scaled_loads(lam_GE, tokens, model.top_k) for lam_GE in routing.lam])
