"""One cell of the study of time to loss: all contenders of a setting train at once, step by step in turns.

They start from the same weights and see the same data in the same order. What disturbs the machine for a while disturbs
all of them alike, because each step of one lies beside the same step of the others.

Time is that of the MoE layers alone, in CPU seconds of one thread. On one device it is the routed experts' forward and
backward. Over ranks it is the critical path of :mod:`lrmoe.parallel.phase_timer`: planning, dispatch, experts and
combine of the slowest rank between any two exchanges, and the bytes of the busiest rank at a stated bandwidth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from lrmoe.balance import get
from lrmoe.config import LRMoEConfig
from lrmoe.parallel import ExpertParallel, parallelize
from lrmoe.parallel.phase_timer import PhaseTimer
from lrmoe.studies.cell_file import MAYBE_NUMBER, NUMBER, RECORDS, TEXT, TEXTS, Kind, numbers, require
from lrmoe.training.documents import read_documents
from lrmoe.training.files import write_json
from lrmoe.training.presets import BYTE_VOCAB_SIZE
from lrmoe.training.run import versions
from lrmoe.training.text import TokenText, TrainingOrder, ValidationSet, tokenize
from lrmoe.training.tokenizer import byte_tokenizer
from lrmoe.training.world import World
from paper.time_to_loss.model import LanguageModel, parameter_groups

Role = Literal["baseline", "recipe", "variant", "yardstick"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to train.

    Attributes:
        name: in the tables.
        role: ``recipe`` is what is recommended, to be held against each ``baseline``; a ``variant`` is another setting
            of ours, a ``yardstick`` what no choice by importance should lose to.
        policy: who hosts which expert, for :func:`lrmoe.balance.get`; None on one device.
        config: of the backward.
    """

    name: str
    role: Role
    policy: str | None
    config: LRMoEConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of model, data and training; see :class:`paper.time_to_loss.config.TimeToLossConfig`."""

    text: str | None
    layers: int
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    heads: int
    batch: int
    seq: int
    steps: int
    lr: float
    lr_warmup_steps: int
    weight_decay: float
    slots: int
    bandwidth: float
    eval_every: int
    eval_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CellPlan:
    """What one cell trains."""

    setting: str
    seed: int
    balance_loss_weight: float
    contenders: tuple[Contender, ...]
    sizes: Sizes


def learning_rate(step: int, sizes: Sizes) -> float:
    """Of step 0, 1, ...: a linear rise, then constant. With a decay the end of a run would be flat, and a loss that one
    run has there would be out of reach for another that is a little behind, however long it has left."""
    return sizes.lr * min(1.0, (step + 1) / max(1, sizes.lr_warmup_steps))


class Contestant:
    """A contender in training, on this rank."""

    def __init__(self, contender: Contender, plan: CellPlan, world: World) -> None:
        sizes = plan.sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            model = LanguageModel(
                vocab_size=BYTE_VOCAB_SIZE,
                seq=sizes.seq,
                dim=sizes.dim,
                layers=sizes.layers,
                heads=sizes.heads,
                expert_dim=sizes.expert_dim,
                num_experts=sizes.num_experts,
                top_k=sizes.top_k,
                balance_loss_weight=plan.balance_loss_weight,
            )
        self.contender = contender
        self.clock = PhaseTimer(bytes_per_s=sizes.bandwidth)
        self.engine: ExpertParallel | None = None
        self._model = model
        self._world = world
        self._forward: torch.nn.Module = model
        if contender.policy is not None:
            policy = balancer(contender.policy, slots=sizes.slots, experts=sizes.num_experts, ranks=world.size)
            self.engine = ExpertParallel(
                num_experts=sizes.num_experts, policy=policy, gradient_divisor=world.size, clock=self.clock
            )
            parallelize(model, self.engine)
            self._forward = DistributedDataParallel(model)
        self._recal = lrmoe.attach(model, contender.config)
        self._optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=sizes.weight_decay), lr=sizes.lr)
        self._counted_s = 0.0
        self._phases: dict[str, float] = {}
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.compute_s: list[float] = []
        self.balanced_s: list[float] = []
        self.transfer_s: list[float] = []

    def step(self, ids_BS: Tensor, lr: float, validation: list[Tensor]) -> None:
        """Trains on this rank's sequences and notes loss and time.

        Args:
            ids_BS: the sequences.
            lr: learning rate.
            validation: batches to validate the weights on that the step begins with; none for no validation.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = self._forward(ids_BS)
        loss.backward()
        self._note_time()
        if validation:
            # Before the weights change: those that SYMI sends to its slots would else be sent for this, unseen.
            self.validate(validation)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._recal.step()
        if self.engine is not None:
            self.engine.step(self._optimizer)
        self.losses += self._world.mean([float(loss.detach())])

    def validate(self, batches: list[Tensor]) -> None:
        """Notes the mean loss of the batches of all ranks, and the number of steps so far; takes no time."""
        self._model.eval()
        with torch.no_grad():
            total = sum(float(self._model(ids_BS)) * len(ids_BS) for ids_BS in batches)
        loss = total / sum(map(len, batches))
        self._model.train()
        self.clock.collect()
        self.validation.append((len(self.losses), self._world.mean([loss])[0]))

    def _note_time(self) -> None:
        if self.engine is None:
            meters = [control.meter for control in self._recal.layers.values()]
            total = sum(meter.forward_seconds + meter.backward_seconds for meter in meters)
            seconds, self._counted_s = total - self._counted_s, total
            self.compute_s.append(seconds)
            self.balanced_s.append(seconds)
            self.transfer_s.append(0.0)
            return
        path = self.clock.collect()
        self.compute_s.append(path.compute_s)
        self.balanced_s.append(path.mean_compute_s)
        self.transfer_s.append(path.transfer_s)
        for phase in path.phases:
            self._phases[phase.name] = self._phases.get(phase.name, 0.0) + phase.critical_s

    def finish(self) -> dict[str, Any]:
        """The contender's record."""
        told = self._recal.metrics()
        planned = {} if self.engine is None else self.engine.metrics()
        contender = self.contender
        # A rank's own share may hold fewer pairs: kept is counted over all of them.
        kept = planned["kept_rows"] / planned["rows"] if planned else told["kept_share"]
        return {
            "name": contender.name,
            "role": contender.role,
            "policy": contender.policy,
            "recalibration": contender.config.to_dict(),
            "kept_share": kept,
            "load_max_over_mean": planned.get("home_max_over_mean"),
            "rows_max_over_mean": planned.get("forward_max_over_mean"),
            "kept_max_over_mean": planned.get("backward_max_over_mean"),
            "replicas": planned.get("replicas"),
            "phases_s": self._phases,
            "losses": self.losses,
            "validation": self.validation,
            "compute_s": self.compute_s,
            "balanced_s": self.balanced_s,
            "transfer_s": self.transfer_s,
        }


def balancer(name: str, *, slots: int, experts: int, ranks: int) -> Any:
    """The policy with room for ``slots`` experts of others on every rank, however it counts them."""
    if name == "fixed":
        return get(name)
    if name == "symi":
        return get(name, slots=-(-experts // ranks) + slots)
    # Its default, for batches of many thousand rows, would forbid every replica here.
    return get(name, slots=slots, **({"floor": 1} if name == "ultraep" else {}))


def run_cell(world: World, plan: CellPlan, path: Path, tell: Callable[[int], None]) -> None:
    """Trains all contenders on one thread of each rank; rank 0 writes the records.

    Args:
        world: the ranks, all of which call. Where contenders name a policy, the default process group is theirs.
        plan: what to train.
        path: the JSON file to write.
        tell: called with the number of finished steps, of all contenders together.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [contestant.finish() for contestant in _train(world, plan, tell)]
    finally:
        torch.set_num_threads(threads)
    if world.is_main:
        about = {"setting": plan.setting, "seed": plan.seed, "ranks": world.size, "versions": versions()}
        write_json(path, {**about, "contenders": rows})


def check_cell(cell: Mapping[str, Any], plan: CellPlan) -> None:
    """Checks what :func:`run_cell` wrote, read back with the ``seconds`` that it took.

    Raises:
        ValueError: naming what is missing or of another kind.
    """
    require(cell, {"versions": TEXTS, "seconds": NUMBER, "contenders": RECORDS})
    names, wanted = [row.get("name") for row in cell["contenders"]], [one.name for one in plan.contenders]
    if names != wanted:
        raise ValueError(f"contenders={names} must be {wanted}")
    steps = numbers(plan.sizes.steps)
    kinds: dict[str, Kind] = {
        "name": TEXT,
        **dict.fromkeys(("losses", "compute_s", "balanced_s", "transfer_s"), steps),
        **dict.fromkeys(("kept_share", "load_max_over_mean", "rows_max_over_mean"), MAYBE_NUMBER),
        **dict.fromkeys(("kept_max_over_mean", "replicas"), MAYBE_NUMBER),
        "validation": ("a list of pairs of steps and a loss, the steps rising", _is_curve),
    }
    for row in cell["contenders"]:
        require(row, kinds, where=f"contender {row['name']}, ")


def _is_curve(value: Any) -> bool:
    pair = numbers(2)[1]
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(map(pair, value))
        and all(before[0] < after[0] for before, after in itertools.pairwise(value))
    )


def _train(world: World, plan: CellPlan, tell: Callable[[int], None]) -> list[Contestant]:
    sizes = plan.sizes
    text, sequences = read_text(sizes, world.size)
    order = TrainingOrder(text.train_N, seq=sizes.seq, length=sizes.steps * sizes.batch, seed=plan.seed)
    validation = _batches(world, sequences, sizes)
    contestants = [Contestant(contender, plan, world) for contender in plan.contenders]
    mine = sizes.batch // world.size
    for step in range(sizes.steps):
        start = step * sizes.batch + world.rank * mine
        ids_BS = torch.stack([order[place]["input_ids"] for place in range(start, start + mine)])
        # Who comes first changes, so that nobody always finds the caches that the same neighbour left.
        first = step % len(contestants)
        for done, contestant in enumerate(contestants[first:] + contestants[:first], start=1):
            contestant.step(ids_BS, learning_rate(step, sizes), validation if step % sizes.eval_every == 0 else [])
            tell(step * len(contestants) + done)
    for contestant in contestants:
        contestant.validate(validation)
    return contestants


def read_text(sizes: Sizes, ranks: int) -> tuple[TokenText, ValidationSet]:
    """What so many ranks train and validate on.

    Raises:
        ValueError: naming ``text``, if it cannot be read or is too short.
    """
    text = tokenize(read_documents(sizes.text), byte_tokenizer(), seq=sizes.seq)
    sequences = ValidationSet(text.validation_N, seq=sizes.seq, sequences=sizes.eval_sequences)
    if len(sequences) < ranks:
        raise ValueError(
            f"text={sizes.text!r} has {len(sequences)} sequences to validate on, fewer than ranks={ranks}; give more "
            "text or lower seq"
        )
    return text, sequences


def _batches(world: World, sequences: ValidationSet, sizes: Sizes) -> list[Tensor]:
    """This rank's part: as many sequences on every rank, since the experts of each wait for the tokens of all."""
    share, mine = len(sequences) // world.size, sizes.batch // world.size
    ids = [sequences[place]["input_ids"] for place in range(world.rank * share, (world.rank + 1) * share)]
    return [torch.stack(ids[place : place + mine]) for place in range(0, share, mine)]


def work(world: World, plan: CellPlan, path: str, post: Connection) -> int:
    """:func:`run_cell` in a process of :func:`lrmoe.training.launch.launch`; rank 0 posts the steps done."""
    run_cell(world, plan, Path(path), post.send if world.is_main else _ignore)
    return 0


def _ignore(done: int) -> None:
    pass
