"""What the ranks tell each other before a layer's rows travel: their loads, and that they mean the same call.

It is the one collective that every rank enters whatever happens. A rank whose arguments are wrong says so in it, so
that the others stop too and do not wait for rows that never come.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.balance.policy import ExactPolicy, Policy
from lrmoe.config import LRMoEConfig
from lrmoe.experts.meter import is_recording
from lrmoe.parallel.arguments import Tensors
from lrmoe.parallel.collectives import Traffic
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import OwnPairs
from lrmoe.parallel.meeting import CALL, PREFACE, REFUSED, Place, astray, gather_numbers, lengthen, meet, same_call

_POLICY = "the state of the policy"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSignature:
    """What has to be the same on all ranks, by the names under which a difference is reported."""

    width: int
    expert_width: int
    dtype: torch.dtype
    activation: str
    config: str
    seed: int
    place: Place
    drop: float
    biases: tuple[bool, ...]
    gradients: tuple[bool, ...]
    policy: int

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        activation: str,
        config: LRMoEConfig,
        *,
        dtype: torch.dtype,
        seed: int,
        place: Place,
        drop: float,
        policy: int,
    ) -> CallSignature:
        """Those of a call, with products in ``dtype``; ``policy`` is a checksum of the state that the policy plans
        from."""
        return cls(
            width=tensors.x_TD.shape[1],
            expert_width=tensors.down_proj.shape[2],
            dtype=dtype,
            activation=activation,
            config=repr(config.to_dict()),
            seed=seed,
            place=place,
            drop=drop,
            biases=(tensors.gate_up_bias is not None, tensors.down_bias is not None),
            gradients=tuple(tensor is not None and tensor.requires_grad for tensor in tensors.trainable),
            policy=policy,
        )

    def numbers(self) -> dict[str, int]:
        """Each field but the place as one int64. Texts by their checksum."""
        return {
            "the width of x_TD": self.width,
            "the width of the experts": self.expert_width,
            "the dtype of the products": _DTYPES.index(self.dtype),
            "activation": zlib.crc32(self.activation.encode()),
            "config": zlib.crc32(self.config.encode()),
            "seed": self.seed,
            "drop": struct.unpack("<q", struct.pack("<d", self.drop))[0],
            "which biases there are (gate_up_bias, down_bias)": _bits(self.biases),
            "which gradients are wanted (x, routing weights, gate_up_proj, down_proj, biases)": _bits(self.gradients),
            _POLICY: self.policy,
        }


@dataclass(frozen=True, slots=True)
class Loads:
    """int64 CPU: ``real_GE`` and ``masked_GE``, pairs of each rank for each expert, of real and of masked tokens;
    ``recording``: somebody records, on some rank, and all tell what becomes of their pairs; ``stale``: some rank has no
    weights, or old ones, of the experts it computes with."""

    real_GE: Tensor
    masked_GE: Tensor
    recording: bool
    stale: bool


class Agreement:
    """What one engine says to those of the other ranks before each call, and hears of them.

    Args:
        num_experts: E.
        description: what all ranks must have given their engines, by the names under which a difference is reported;
            compared once, before the first loads.
    """

    def __init__(self, num_experts: int, description: Mapping[str, object]) -> None:
        self._num_experts = num_experts
        self._description = description
        self._met = False

    def gather(self, exchange: Exchange, signature: CallSignature, own: OwnPairs, *, stale: bool) -> Loads:
        """:func:`gather_loads` of a call that this rank can make; before the first one, :func:`agree_on_engine`."""
        return self._gather(exchange, signature, own.real_E, own.masked_E, stale=stale)

    def agree_on_moves(self, exchange: Exchange, moving: object, device: torch.device, *, refused: bool) -> None:
        """Checks, before experts move, that they can on every rank, and that all ranks move the same.

        Args:
            moving: what moves, the same on all ranks; it has a ``repr`` of its values.
            device: to communicate from.
            refused: this rank cannot, and raises its own error afterwards.

        Raises:
            RuntimeError: on every rank that has not refused, if another has, or the ranks would move different things,
                or another rank makes a call instead.
            RankFailure: if a rank does not come.
        """
        self._meet(exchange, device)
        numbers = torch.tensor([int(refused), zlib.crc32(repr(moving).encode())], dtype=torch.int64, device=device)
        told = meet(
            "moves", numbers, exchange.group, timeout_s=exchange.timeout_s, traffic=exchange.traffic, refuses=refused
        )
        if refused:
            return
        if ranks := _ranks(told[:, 0] != 0):
            raise RuntimeError(
                f"experts cannot move on rank {ranks} of the expert-parallel group; see the error there. Nothing has "
                "moved on any rank"
            )
        if len(set(told[:, 1].tolist())) > 1:
            raise RuntimeError(
                "the ranks of the expert-parallel group would move different experts, or optimizers that keep "
                "different things for them: call ExpertParallel.step and load_state_dict on every rank, with the same "
                "state and like optimizers. Nothing has moved on any rank"
            )

    def refuse(self, exchange: Exchange, error: Exception, x_TD: object) -> NoReturn:
        """Tells the other ranks, which already wait for this one's loads, and raises ``error``.

        Args:
            x_TD: what was given for the tokens, right or wrong.
        """
        device = x_TD.device if isinstance(x_TD, Tensor) else torch.device("cpu")
        nothing_E = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        try:
            self._gather(exchange, None, nothing_E, nothing_E, stale=False)
        except RuntimeError as other:
            raise error from other
        raise error

    def _gather(
        self, exchange: Exchange, signature: CallSignature | None, real_E: Tensor, masked_E: Tensor, *, stale: bool
    ) -> Loads:
        self._meet(exchange, real_E.device)
        return gather_loads(
            signature,
            real_E,
            masked_E,
            exchange.group,
            recording=is_recording(),
            stale=stale,
            timeout_s=exchange.timeout_s,
            traffic=exchange.traffic,
        )

    def _meet(self, exchange: Exchange, device: torch.device) -> None:
        if not self._met:
            agree_on_engine(
                self._description, exchange.group, device, timeout_s=exchange.timeout_s, traffic=exchange.traffic
            )
            lengthen(exchange.group, _HEAD + 2 * self._num_experts)
            self._met = True


def describe_policy(policy: Policy) -> str:
    """What of a policy has to be the same on all ranks, for :class:`Agreement`."""
    options: dict[str, object] = {"slots": policy.slots}
    # What is in another policy may be of this rank alone.
    if isinstance(policy, ExactPolicy):
        own = {name: value for name, value in vars(policy).items() if isinstance(value, int | float | str | None)}
        options = {**own, **options}
    return f"{policy.name!r} with {', '.join(f'{name}={options[name]!r}' for name in sorted(options))}"


def gather_loads(
    signature: CallSignature | None,
    real_E: Tensor,
    masked_E: Tensor,
    group: dist.ProcessGroup,
    *,
    recording: bool,
    stale: bool,
    timeout_s: float | None,
    traffic: Traffic,
) -> Loads:
    """Everybody's loads, once everybody is known to make the same call.

    Args:
        signature: None on a rank whose arguments are wrong; it raises its own error afterwards.
        real_E, masked_E: int64, this rank's pairs.

    Raises:
        RuntimeError: if another rank's arguments are wrong, or the ranks make different calls, naming what differs.
        RankFailure: if a rank does not come.
    """
    num_experts = real_E.numel()
    names = list(_NAMES)
    preface = [REFUSED] + [0] * (PREFACE - 1) if signature is None else signature.place.preface()
    own = [0] * len(names) if signature is None else list(signature.numbers().values())
    head = torch.tensor([*preface, int(recording), int(stale), *own], dtype=torch.int64, device=real_E.device)
    numbers = torch.cat([head, real_E, masked_E])
    told = gather_numbers(numbers, group, what="loads", timeout_s=timeout_s, traffic=traffic)[:, : numbers.numel()]
    refused = _ranks(told[:, 0] == REFUSED)
    if signature is not None:
        _expect_one_place(told)
        if refused:
            raise RuntimeError(
                f"rank {refused} of the expert-parallel group was given arguments it had to refuse; see the error "
                "there. This rank stops with it, because its tokens cannot be exchanged"
            )
        for name, value_G in zip(names, told[:, _HEAD - len(names) : _HEAD].t().tolist(), strict=True):
            if len(set(value_G)) > 1:
                raise RuntimeError(_difference(name, value_G))
    real_GE, masked_GE = told[:, _HEAD:-num_experts], told[:, -num_experts:]
    recorded, old = (bool(told[:, PREFACE + place].any()) for place in (0, 1))
    return Loads(real_GE.contiguous(), masked_GE.contiguous(), recorded, old)


def agree_on_engine(
    description: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    timeout_s: float | None,
    traffic: Traffic,
) -> None:
    """Checks, before the first loads are exchanged, that all ranks made their engines alike; else their plans, or the
    lengths of their messages, would differ.

    Raises:
        RuntimeError: on all ranks, naming what differs.
    """
    values = [zlib.crc32(repr(value).encode()) for value in description.values()]
    sums = torch.tensor(values, dtype=torch.int64, device=device)
    told = meet("engines", sums, group, timeout_s=timeout_s, traffic=traffic)
    for (name, value), sum_G in zip(description.items(), told.t().tolist(), strict=True):
        if len(set(sum_G)) > 1:
            others = [rank for rank, other in enumerate(sum_G) if other != sum_G[group.rank()]]
            raise RuntimeError(
                f"the ranks made their ExpertParallel differently: here (rank {group.rank()}) {name} is {value}, and "
                f"another on rank {', '.join(map(str, others))}; give every rank the same"
            )


def _expect_one_place(told: Tensor) -> None:
    """RuntimeError unless all ranks are in a call of one layer, at one step and microbatch, to train or all not to;
    those that refuse theirs say so themselves."""
    rows = [row[:PREFACE] for row in told.tolist()]
    if len({same_call(row) for row in rows if row[0] == CALL}) <= 1 and all(row[0] in (CALL, REFUSED) for row in rows):
        return
    raise RuntimeError(astray(told))


def _ranks(is_G: Tensor) -> str:
    return ", ".join(map(str, is_G.nonzero().flatten().tolist()))


def _bits(flags: Sequence[bool]) -> int:
    return sum(flag << place for place, flag in enumerate(flags))


def _difference(name: str, value_G: list[int]) -> str:
    shown: list[object] = list(value_G)
    if name == "drop":
        shown = [struct.unpack("<d", struct.pack("<q", value))[0] for value in value_G]
    elif "dtype" in name:
        shown = [_DTYPES[value] for value in value_G]
    elif name == _POLICY:
        return (
            f"{name} is not the same on all ranks of the expert-parallel group, so their plans would not fit together: "
            "call ExpertParallel.step and load_state_dict on every rank, as often and with the same state"
        )
    elif name in ("activation", "config"):
        attached = ", and call lrmoe.attach on all of them or on none" if name == "config" else ""
        return f"{name} is not the same on all ranks of the expert-parallel group; give every rank the same{attached}"
    values = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(shown))
    return (
        f"{name} is not the same on all ranks of the expert-parallel group: {values}. Every rank has to call the same "
        "layer with the same configuration"
    )


_NAMES = tuple(
    CallSignature(
        width=0, expert_width=0, dtype=torch.float32, activation="", config="", seed=0, drop=0.0, biases=(),
        gradients=(), policy=0,
        place=Place(trains=False, steered=False, known=False, layer=0, step=0, microbatch=0),
    ).numbers()
)  # fmt: skip
# What the call is, whether the rank records and has old weights; then the signature.
_HEAD = PREFACE + 2 + len(_NAMES)
