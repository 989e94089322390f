"""A plan: which ranks hold an instance of each expert, and which rows each instance computes.

Shapes: E experts, G ranks. A *row* is one token-expert pair; ``lam_GE[s, e]`` counts the pairs of source rank s that
the router sent to expert e. The *home* of an expert is the rank that owns its weights; a *replica* is another instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Ownership = Literal["home", "placed", "sharded"]
"""Where the experts and their optimizer state live: ``home``, on the rank of :func:`home_ranks`, other instances being
copies for one layer; ``placed``, on the ranks where the policy puts them, until it moves them; ``sharded``, an equal
part of every expert on every rank, instances being copies."""


def home_ranks(num_experts: int, num_ranks: int) -> list[int]:
    """The rank that owns each expert: contiguous ranges, the first ``num_experts % num_ranks`` ranks one longer.

    Raises:
        ValueError: unless 1 <= num_ranks <= num_experts.
    """
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(
            f"num_ranks={num_ranks} must be between 1 and num_experts={num_experts}: every rank owns an expert; use "
            "fewer ranks for the experts"
        )
    size, longer = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(size + (rank < longer))]


@dataclass(frozen=True, eq=False)
class Plan:
    """Who computes what in one layer and one microbatch. All tensors are int64 on the CPU.

    Args:
        hosts: the ranks of each expert's instances, its home first, then its replicas in the order they were planned;
            of a policy that places experts elsewhere in ascending order. One rank is one instance of an expert, however
            many of its slots hold it.
        rows_EG: forward rows of each instance; a row of the table adds up to the load of its expert.
        quota_EG: how many of these rows the backward of the instance keeps, 0 <= quota <= rows.
        lam_GE: the loads the plan was made for.
        extra_dropped: rows that the backward leaves out beyond the drop that was asked for, to fit a hard capacity.
        route: gives ``alloc``, of a policy that fixes the way of its rows; None for :func:`split_exact`. Plans of all
            layers are kept until the backward, and the table is large.
    """

    hosts: tuple[tuple[int, ...], ...]
    rows_EG: Tensor
    quota_EG: Tensor
    lam_GE: Tensor
    extra_dropped: int = 0
    route: Callable[[], Tensor] | None = None

    @property
    def alloc(self) -> Tensor:
        """(G, E, G): how many rows of source rank s for expert e go to rank d.

        Sums over d give ``lam_GE``, sums over s give ``rows_EG``, both exactly. See :func:`split_exact`.
        """
        if self.route is not None:
            return self.route()
        num_ranks, num_experts = self.lam_GE.shape
        # Where one instance takes all rows of an expert, no matter which, there is nothing to split.
        only_E = self.rows_EG.argmax(1)
        split_R = ((self.rows_EG > 0).sum(1) > 1).nonzero().squeeze(1)
        alloc_GEG = torch.zeros(num_ranks, num_experts, num_ranks, dtype=torch.int64, device="cpu")
        alloc_GEG.scatter_(2, only_E.view(1, -1, 1).expand(num_ranks, -1, 1), self.lam_GE.unsqueeze(2))
        if split_R.numel():
            split_RGG = split_exact(self.lam_GE.t()[split_R], self.rows_EG[split_R])
            alloc_GEG[:, split_R] = split_RGG.transpose(0, 1)
        return alloc_GEG

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """The experts of which each rank holds a replica, in slot order: ascending expert id."""
        replicas: list[list[int]] = [[] for _ in range(self.lam_GE.shape[0])]
        for expert, ranks in enumerate(self.hosts):
            for rank in ranks[1:]:
                replicas[rank].append(expert)
        return tuple(map(tuple, replicas))

    @cached_property
    def num_replicas(self) -> int:
        """How many weight copies the plan asks for, over all ranks."""
        return sum(len(ranks) - 1 for ranks in self.hosts)

    @property
    def moved_rows(self) -> int:
        """Forward rows that replicas compute instead of the home ranks."""
        home_E = torch.tensor([ranks[0] for ranks in self.hosts], dtype=torch.int64, device="cpu")
        return int(self.rows_EG.sum() - self.rows_EG.gather(1, home_E.unsqueeze(1)).sum())

    def validate(self, slots: int | None = None, *, ownership: Ownership = "home") -> Plan:
        """Checks every promise of a plan, e.g. of a policy of your own, and returns it.

        Args:
            slots: replicas a rank may hold; not checked if None. Of a policy with another ownership than ``home``:
                experts a rank may hold.
            ownership: of the policy; only where it is ``home`` must hosts begin with the expert's home.

        Raises:
            ValueError: naming what does not hold and where.
        """
        num_ranks, num_experts = self.lam_GE.shape
        homes = home_ranks(num_experts, num_ranks)
        for name in ("rows_EG", "quota_EG"):
            table = getattr(self, name)
            if table.shape != (num_experts, num_ranks) or table.dtype != torch.int64 or table.device.type != "cpu":
                raise ValueError(
                    f"{name} is {table.dtype} {tuple(table.shape)} on {table.device}; it must be int64 "
                    f"({num_experts}, {num_ranks}) on the CPU"
                )
        if len(self.hosts) != num_experts:
            raise ValueError(f"hosts lists {len(self.hosts)} experts; the loads have {num_experts}")
        elsewhere_EG = torch.ones(num_experts, num_ranks, dtype=torch.bool, device="cpu")
        for expert, ranks in enumerate(self.hosts):
            if not ranks:
                raise ValueError(f"hosts[{expert}] is empty: every expert needs a host")
            if ownership == "home" and ranks[0] != homes[expert]:
                raise ValueError(f"hosts[{expert}]={ranks} must begin with the expert's home, rank {homes[expert]}")
            if len(set(ranks)) < len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
                raise ValueError(f"hosts[{expert}]={ranks} must be different ranks in [0, {num_ranks})")
            elsewhere_EG[expert, list(ranks)] = False
        _require_none("rows_EG is negative", self.rows_EG < 0)
        _require_none("rows_EG has rows on a rank that does not host the expert", elsewhere_EG & (self.rows_EG != 0))
        _require_none("quota_EG is not in [0, rows]", (self.quota_EG < 0) | (self.quota_EG > self.rows_EG))
        _require_none("rows_EG does not add up to the loads", self.rows_EG.sum(1) != self.lam_GE.sum(0))
        if self.route is not None:
            alloc_GEG, shape = self.route(), (num_ranks, num_experts, num_ranks)
            if alloc_GEG.shape != shape or alloc_GEG.dtype != torch.int64:
                raise ValueError(f"alloc is {alloc_GEG.dtype} {tuple(alloc_GEG.shape)}; it must be int64 {shape}")
            _require_none("alloc is negative", alloc_GEG < 0)
            _require_none("alloc does not add up to lam_GE", alloc_GEG.sum(2) != self.lam_GE)
            _require_none("alloc does not add up to rows_EG", alloc_GEG.sum(0) != self.rows_EG)
        if slots is not None and ownership != "home":
            held_G = [sum(rank in ranks for ranks in self.hosts) for rank in range(num_ranks)]
            for rank, held in enumerate(held_G):
                if held > slots:
                    raise ValueError(f"rank {rank} hosts {held} experts, but has {slots} slots")
        elif slots is not None:
            for rank, experts in enumerate(self.slots):
                if len(experts) > slots:
                    raise ValueError(f"rank {rank} hosts replicas of experts {experts}, but has {slots} slots")
        return self


def split_exact(lam_RG: Tensor, rows_RG: Tensor) -> Tensor:
    """Which source's rows each instance takes: (R, G source, G host), non-negative, both sums exact.

    A host first serves its own pairs, as far as its rows go. What is left of the sources then fills what is left of the
    hosts, both in ascending rank order: a source that rounded its own shares could overfill a host, which a hard
    capacity does not allow.

    Args:
        lam_RG: pairs of each source rank for each of R experts.
        rows_RG: rows of each host; the same sum an expert.
    """
    local_RG = torch.minimum(lam_RG, rows_RG)
    # Source s has the remaining rows [from_s, to_s) of an expert, host d the same of its places; what both have in
    # common goes from s to d.
    to_s_RG1 = (lam_RG - local_RG).cumsum(1).unsqueeze(2)
    to_d_R1G = (rows_RG - local_RG).cumsum(1).unsqueeze(1)
    from_s_RG1 = to_s_RG1 - (lam_RG - local_RG).unsqueeze(2)
    from_d_R1G = to_d_R1G - (rows_RG - local_RG).unsqueeze(1)
    split_RGG = (torch.minimum(to_s_RG1, to_d_R1G) - torch.maximum(from_s_RG1, from_d_R1G)).clamp_(min=0)
    split_RGG.diagonal(dim1=1, dim2=2).add_(local_RG)
    return split_RGG


def build_plan(
    lam_GE: Tensor,
    homes: Sequence[int],
    exports: Sequence[tuple[int, int, int]],
) -> tuple[tuple[tuple[int, ...], ...], Tensor]:
    """The hosts and rows (E, G) that come of ``exports``: (expert, rank, rows) of each replica, in planned order."""
    num_ranks, num_experts = lam_GE.shape
    hosts: list[tuple[int, ...]] = [(home,) for home in homes]
    rows_EG = torch.zeros(num_experts, num_ranks, dtype=torch.int64, device="cpu")
    rows_EG.scatter_(1, torch.tensor(homes, dtype=torch.int64, device="cpu").unsqueeze(1), lam_GE.sum(0).unsqueeze(1))
    for expert, rank, rows in exports:
        hosts[expert] = (*hosts[expert], rank)
        rows_EG[expert, rank] += rows
        rows_EG[expert, homes[expert]] -= rows
    return tuple(hosts), rows_EG


def _require_none(problem: str, wrong: Tensor) -> None:
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"the plan is wrong: {problem}, first at {place}")
