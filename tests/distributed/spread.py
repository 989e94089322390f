"""A routed-experts problem over several ranks: each takes some of the tokens and its part of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, Result
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.meter import BackwardCall
from lrmoe.parallel import ExpertParallel


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The results of all ranks put together, and what each of them has to tell."""

    result: Result
    metrics: list[dict[str, Any]]
    calls: list[list[BackwardCall]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One problem on some ranks; ``options`` of :class:`ExpertParallel`, ``shares`` tokens of each rank (even ones if
    not given)."""

    problem: Problem
    config: LRMoEConfig | None = None
    shares: Sequence[int] | None = None
    position: dict[str, int] = field(default_factory=dict)
    record: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def even_shares(tokens: int, ranks: int) -> list[int]:
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


def run_spread(
    problem: Problem,
    ranks: int,
    config: LRMoEConfig | None = None,
    *,
    shares: Sequence[int] | None = None,
    position: dict[str, int] | None = None,
    record: bool = True,
    timeout: float = 60.0,
    **options: Any,
) -> Spread:
    """``lrmoe.routed_experts`` on ``ranks`` processes, forward and backward.

    Args:
        shares: tokens of each rank, in order; even ones by default.
        options: of :class:`ExpertParallel`.
    """
    job = Job(problem=problem, config=config, shares=shares, position=position or {}, record=record, options=options)
    return run_jobs([job], ranks, timeout=timeout)[0]


def run_jobs(jobs: Sequence[Job], ranks: int, *, timeout: float = 60.0) -> list[Spread]:
    """Several problems, one after the other, in one call of the processes."""
    told = run_world(ranks, _one_rank, list(jobs), timeout=timeout)
    return [_spread(list(ranks_told)) for ranks_told in zip(*told, strict=True)]


def _spread(told: list[_Told]) -> Spread:
    joined = Result(
        out_TD=torch.cat([out for out, *_ in told]),
        grads={name: torch.cat([grads[name] for _, grads, *_ in told]) for name in told[0][1]},
        call=joined_call([calls for *_, calls in told]),
    )
    return Spread(result=joined, metrics=[metrics for _, _, metrics, _ in told], calls=[calls for *_, calls in told])


def joined_call(calls: list[list[BackwardCall]]) -> BackwardCall | None:
    """One backward of all ranks as one process would record it."""
    if not calls[0]:
        return None
    first = [own[0] for own in calls]
    return BackwardCall(
        step=first[0].step,
        layer=first[0].layer,
        microbatch=first[0].microbatch,
        kept_TK=torch.cat([call.kept_TK for call in first]),
        weight_TK=torch.cat([call.weight_TK for call in first]),
        importance_TK=torch.cat([call.importance_TK for call in first]),
        quota_E=first[0].quota_E,
        load_E=first[0].load_E,
    )


_Told = tuple[Tensor, dict[str, Tensor], dict[str, Any], list[BackwardCall]]


def _one_rank(group: dist.ProcessGroup, jobs: list[Job]) -> list[_Told]:
    return [one_job(group, job) for job in jobs]


def one_job(group: dist.ProcessGroup, job: Job) -> _Told:
    """What one rank does for a job: output, gradients, metrics and recorded calls."""
    problem = job.problem
    engine = ExpertParallel(group, num_experts=problem.num_experts, config=job.config, **job.options)
    mine = own_tokens(job.shares or even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    leaves = local_leaves(problem, engine, mine)
    with lrmoe.recording() if job.record else nullcontext([]) as calls:
        out_TD = engine.routed_experts(
            topk_ids_TK=problem.ids_TK[mine],
            activation=problem.activation,
            token_mask_T=None if problem.mask_T is None else problem.mask_T[mine],
            **leaves,
            **job.position,
        )
        out_TD.backward(problem.grad_TD[mine])
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    assert all(grad is not None for grad in grads.values())
    return out_TD.detach(), grads, engine.metrics(), calls  # type: ignore[return-value]


def own_tokens(shares: Sequence[int], rank: int) -> slice:
    """Which of the problem's tokens are ``rank``'s."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def local_leaves(problem: Problem, engine: ExpertParallel, tokens: slice) -> dict[str, Tensor]:
    """One rank's tokens and experts, differentiable."""
    found = {
        name: engine.local(leaf) if name in PARAMETERS else leaf[tokens] for name, leaf in problem.leaves().items()
    }
    return {
        name: leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_() for name, leaf in found.items()
    }
