"""ExpertParallel: the experts of all layers spread over a process group, by a balancing policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.balance.ownership import HistoryPolicy, ownership_of
from lrmoe.balance.plan import Ownership, home_ranks
from lrmoe.balance.policy import Policy
from lrmoe.config import LRMoEConfig, require_config, require_count, require_number
from lrmoe.experts.custom_ops import routing_fingerprint
from lrmoe.experts.layer_control import LayerControl, Moment, moment_of
from lrmoe.experts.meter import Meter
from lrmoe.experts.recipe import Recipe
from lrmoe.experts.stored_weights import require_usable
from lrmoe.parallel.agreement import Agreement, CallSignature, describe_policy
from lrmoe.parallel.arguments import Tensors, check_call, chosen_policy, member_group
from lrmoe.parallel.balance_meter import BalanceMeter
from lrmoe.parallel.collectives import Traffic, all_reduce
from lrmoe.parallel.dispatched import Dispatched
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import lay_out, sort_pairs
from lrmoe.parallel.meeting import Place, meet
from lrmoe.parallel.moving import MovingExperts
from lrmoe.parallel.operator import run_experts
from lrmoe.parallel.plan_book import PlanBook
from lrmoe.parallel.registered_layers import RegisteredLayers
from lrmoe.parallel.remainder import GradientSums
from lrmoe.parallel.stores.home import HomeStore
from lrmoe.parallel.stores.placed import PlacedStore
from lrmoe.parallel.stores.sharded import ShardedStore
from lrmoe.parallel.stores.weight_store import WeightStore

if TYPE_CHECKING:
    from lrmoe.parallel.phase_timer import PhaseTimer


class ExpertParallel:
    """Routed experts over the ranks of a group. One object serves all layers of a model.

    Rank r owns a contiguous range of the experts (:attr:`local_experts`); their weights are ordinary parameters of
    that rank. Where the policy says so, other ranks compute a part of an expert's pairs on a copy of its weights for
    the length of a layer.

    What a rank gets back for its tokens does not depend on the tokens of the others, but for the rounding of products
    over other numbers of rows. Which of its pairs the backward keeps does: quotas are of an expert's whole load.

    Args:
        group: the process group; the default group if None. In a group of one nothing is exchanged.
        num_experts: experts of a layer, E, at least as many as ranks.
        policy: a name that :func:`lrmoe.balance.get` knows, or a policy of your own; the same on all ranks.
        slots: of a rank, for a policy given by name: replicas that it may hold, or, with policies that fill all slots
            anew, experts in all; None for the policy's own default.
        storage: ``"policy"`` keeps weights and optimizer state where the policy has them (see
            :mod:`lrmoe.parallel.stores.weight_store`); ``"home"`` keeps them at home, in a contiguous range of experts
            a rank, under every policy: ranks that compute with an expert of another then get a copy for the length of a
            layer. Numbers are the same; what travels and what is held differ.
        capacity: what a rank may hold, in the policy's unit, for a policy given by name; None for no limit.
        config: of the backward, for :meth:`routed_experts`; layers under :func:`lrmoe.attach` bring their own.
        gradient_divisor: what the experts' weight gradients are divided by. They are sums over the tokens of all
            ranks; where the other gradients are *averaged* over ranks, as DDP and FSDP do, give the number of ranks.
        timeout_s: seconds after which a collective gives up and names the ranks that did not come; None for the
            group's own timeout.
        clock: times this rank's phases, see :mod:`lrmoe.parallel.phase_timer`.

    Attributes:
        group, rank, size: the group, this process's rank in it, and the number of ranks.
        local_experts: the ids of the experts at home on this rank.
        ownership: what this rank owns, ``"home"``, ``"placed"`` or ``"sharded"``.
        store: where the weights come from that this rank computes with.
        registered: the parameters of each layer, see :meth:`register`.
        trace: called with (layer, step, microbatch, lam_GE) of each forward trained on, where somebody sets it; all
            ranks see the same.
        traffic: bytes sent to other ranks, by purpose, since :meth:`metrics` was last read.

    Raises:
        ValueError: if the group has more ranks than there are experts, or an argument is out of range.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        policy: str | Policy = "lrmoe",
        slots: int | None = None,
        storage: Literal["policy", "home"] = "policy",
        capacity: float | None = None,
        config: LRMoEConfig | None = None,
        gradient_divisor: float = 1.0,
        timeout_s: float | None = None,
        clock: PhaseTimer | None = None,
    ) -> None:
        self.group = member_group(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.num_experts = require_count("num_experts", num_experts, least=1)
        if self.size > self.num_experts:
            raise ValueError(
                f"num_experts={self.num_experts} is less than the {self.size} ranks of the group: every rank must own "
                "an expert; use a smaller expert-parallel group"
            )
        homes = home_ranks(self.num_experts, self.size)
        self.local_experts = range(homes.index(self.rank), homes.index(self.rank) + homes.count(self.rank))
        own = not isinstance(policy, str)
        policy = chosen_policy(policy, slots, capacity)
        if storage not in ("policy", "home"):
            raise ValueError(f"storage={storage!r} must be 'policy' or 'home'")
        if isinstance(policy, HistoryPolicy):
            policy.prepare(self.num_experts, self.size)
        self.policy = policy
        self.config = require_config(config)
        divisor = float(require_number("gradient_divisor", gradient_divisor))
        if not 0 < divisor < math.inf:
            raise ValueError(f"gradient_divisor={gradient_divisor!r} must be > 0 and finite, e.g. the number of ranks")
        self.gradient_divisor = divisor
        if timeout_s is not None and not 0 < require_number("timeout_s", timeout_s) < math.inf:
            raise ValueError(
                f"timeout_s={timeout_s!r} must be > 0 seconds and finite, or None for the group's own timeout"
            )
        self.timeout_s = timeout_s
        self.clock = clock
        self.ownership: Ownership = "home" if storage == "home" else ownership_of(policy)
        self.registered = RegisteredLayers()
        self.traffic = Traffic()
        self.trace: Callable[[int, int, int, Tensor], None] | None = None
        self._agreement = Agreement(
            self.num_experts,
            {
                "num_experts": self.num_experts,
                "policy": describe_policy(policy),
                "storage": self.ownership,
                "gradient_divisor": divisor,
            },
        )
        self.store: WeightStore
        self._moving: MovingExperts | None = None
        if self.ownership == "home":
            self.store = HomeStore(self.num_experts, self.size, self.rank)
        elif self.ownership == "sharded":
            holds_weights = getattr(policy, "holds_weights", False)
            self.store = ShardedStore(self.num_experts, self.size, self.rank, holds_weights=holds_weights)
        elif self.ownership == "placed" and isinstance(policy, HistoryPolicy):
            self.store = PlacedStore(policy.placement, self.rank)
            self._moving = MovingExperts(policy, self.rank, self.registered, self._agreement)
        else:
            raise ValueError(
                f"policy {policy.name!r} has ownership={self.ownership!r}, which must be 'home', 'sharded' or, of an "
                "lrmoe.balance.ownership.HistoryPolicy, 'placed'; or keep experts at home with storage=\"home\""
            )
        self._book = PlanBook(policy, own=own)
        self._policy_state = 0
        self._note_policy_state()
        self._balance = BalanceMeter()

    def local(self, weight: Tensor) -> Tensor:
        """What this rank owns of a weight of all experts, (E, ...): where experts are at home, the rows of
        :attr:`local_experts`; else a row a slot, or a part of every expert (:mod:`lrmoe.parallel.stores.weight_store`).

        Raises:
            ValueError: if it is not of E experts, quantized or partitioned.
        """
        require_usable("weight", weight)
        if weight.dim() < 2 or weight.shape[0] != self.num_experts:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, of all experts its first dimension must be {self.num_experts}"
            )
        return self.store.local(weight)

    def register(self, layer: int, *owned: Tensor) -> None:
        """Says which parameters, of the form :meth:`local` gives, are those of a layer, so that :meth:`step` can move
        experts. :func:`lrmoe.parallel.parallelize` does it for the layers it finds.

        Args:
            layer: the number under which the policy knows it, whatever number its calls give.
            owned: the same weights in the same order on every rank, ``gate_up_proj`` among them.
        """
        self.registered.add(layer, owned)
        if self._moving is not None:
            self._moving.count_slots(layer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def routed_experts(
        self,
        x_TD: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        token_mask_T: Tensor | None = None,
        step: int = 0,
        layer: int = 0,
        microbatch: int = 0,
    ) -> Tensor:
        """:func:`lrmoe.routed_experts` over all ranks: every rank brings its own tokens and gets their outputs.

        Every rank of the group has to call it, and run the backward of its output, for the same layer in the same
        order, whatever its number of tokens, none included. Gradients of a rank's weights come from the tokens of all
        ranks. Under torch.compile the graph breaks here: the split sizes of an all-to-all are numbers on the host.

        Args:
            x_TD: this rank's tokens; T may differ between ranks.
            topk_ids_TK: ids of the model's experts, in [0, num_experts), or -1.
            topk_weights_TK: routing weights.
            gate_up_proj, down_proj, gate_up_bias, down_bias: what :meth:`local` gives of those of all experts; with
                experts at home (local experts, ...), of :attr:`local_experts` alone.
            activation, token_mask_T, step, layer, microbatch: as there.

        Returns:
            (T, D) in the dtype of ``x_TD``.

        Raises:
            ValueError: for wrong arguments, as there; the other ranks then raise RuntimeError and name this one.
            RuntimeError: if the ranks make different calls.
            BudgetExceeded: on all ranks, if the policy has no plan that fits its capacity.
            RankFailure: if a rank does not come within the timeout.
        """
        try:
            step, layer, microbatch = (
                require_count(name, value)
                for name, value in (("step", step), ("layer", layer), ("microbatch", microbatch))
            )
        except ValueError as error:
            self._agreement.refuse(self._exchange, error, x_TD)
        return self._run(
            Tensors(x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T),
            self.config,
            moment_of(self.config, step=step, microbatch=microbatch),
            torch.tensor([layer, 0, 0], dtype=torch.int64, device="cpu"),
            activation,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def controlled_experts(
        self,
        x_TD: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        control: LayerControl,
        moment: Moment,
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        token_mask_T: Tensor | None = None,
    ) -> Tensor:
        """What layers and hosts call: :meth:`routed_experts` at the position of ``moment`` and with the meter of
        ``control``."""
        return self._run(
            Tensors(x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T),
            control.config,
            moment,
            control.identity_3,
            activation,
        )

    def add_up(self, tensor: Tensor, *, what: str) -> Tensor:
        """The sum of ``tensor`` over the ranks, the same on all bit for bit; every one of them has to call it.

        Raises:
            RuntimeError: on all ranks, if another rank is in another call.
            RankFailure: if a rank does not come within the timeout.
        """
        nothing = torch.empty(0, dtype=torch.int64, device=tensor.device)
        meet(what, nothing, self.group, timeout_s=self.timeout_s, traffic=self.traffic)
        return all_reduce(tensor.clone(), self.group, what=what, timeout_s=self.timeout_s, traffic=self.traffic)

    def metrics(self, *, reset: bool = True) -> dict[str, Any]:
        """What planning did since the last call: see :class:`lrmoe.parallel.balance_meter.BalanceMeter`, and
        ``sent_bytes``, by purpose, of this rank. No communication: all ranks know all plans."""
        found = {**self._balance.read(), "sent_bytes": dict(self.traffic.bytes)}
        if reset:
            self._balance = BalanceMeter()
            self.traffic.bytes.clear()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        # A copied model travels in the same group, by the same policy.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ExpertParallel belongs to the processes of its group and cannot be pickled, nor can a model that it "
            "runs: save model.state_dict() on each rank, or all ranks together with lrmoe.parallel.checkpoint.save"
        )

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Call once after each optimizer step, on every rank: the policy decides for the next one.

        Where it moves experts, their weights and all that the optimizers keep for each expert (Adam's moments, master
        copies) go to their new slots.

        Args:
            optimizers: those of the registered parameters, in the same order on every rank; needed if experts move.

        Raises:
            ValueError: if experts move, but a layer was not registered, or the optimizers do not have its parameters,
                or keep what is not by expert. Nothing has moved then, and the policy decides again at the next call.
            RuntimeError: likewise, if that is so on another rank, or the ranks would move different things.
            RankFailure: if a rank does not come within the timeout.
        """
        self._book.clear()
        if self._moving is None:
            self.policy.step()
        else:
            self._moving.step(optimizers, self._exchange)
        self._note_policy_state()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON-able values: the policy's name and state."""
        return {"policy": self.policy.name, "state": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`.

        Raises:
            ValueError: if it is the state of another policy.
        """
        if state.get("policy") != self.policy.name:
            raise ValueError(
                f"the state is of the policy {state.get('policy')!r}, this is {self.policy.name!r}; resume with the "
                "same"
            )
        self.policy.load_state_dict(state["state"])
        self._note_policy_state()
        self._book.clear()
        if self._moving is not None:
            for layer in self.registered:
                self._moving.count_slots(layer)

    def _note_policy_state(self) -> None:
        # Between steps all ranks see the same loads, so that it is enough to compare what they began the step with.
        if isinstance(self.policy, HistoryPolicy):
            self._policy_state = self.policy.fingerprint()

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self.group, self.timeout_s, self.traffic, self.clock)

    def _number(self, layer: int, gate_up_proj: Tensor) -> int:
        """The number under which the policy knows a layer: that of its registered parameters, else ``layer``."""
        number = self.registered.number_of(gate_up_proj)
        if number is None and self._moving is not None and isinstance(gate_up_proj, nn.Parameter):
            raise ValueError(
                f"gate_up_proj of layer {layer} is not registered, so policy {self.policy.name!r} could not move its "
                "experts: call ExpertParallel.register(layer, ...) again if something has made new parameters (a copy "
                'of the model, load_state_dict(assign=True)); beside FSDP use ExpertParallel(..., storage="home")'
            )
        return layer if number is None else number

    def _run(
        self, tensors: Tensors, config: LRMoEConfig, moment: Moment, identity_3: Tensor, activation: str
    ) -> Tensor:
        """One call, from its arguments to its outputs.

        1. Arguments are checked, this rank's pairs sorted and counted. Whoever finds something wrong says so to all.
        2. All ranks gather each other's loads, and see that they are in the same call.
        3. From the same loads each makes the same plan: which instance of which expert takes how many rows, and keeps
           how many of them in the backward.
        4. The plan becomes this rank's layout: what it sends, what arrives, in which order it lies.
        5. Rows are dispatched, computed and combined; the backward goes the same way with what is kept
           (:mod:`lrmoe.parallel.operator`).
        """
        exchange = self._exchange
        seed, step, microbatch = moment.position_3.tolist()
        layer, handle, place = identity_3.tolist()
        drop_now = float(moment.drop_L[place])
        try:
            dtype, train = check_call(tensors, activation, self.store, num_experts=self.num_experts, rank=self.rank)
            number = self._number(layer, tensors.gate_up_proj)
            # In evaluation a layer has no meter, and another configuration than the engine.
            steered = handle != 0 or config is self.config
            own = sort_pairs(tensors.topk_ids_TK, tensors.token_mask_T, self.num_experts)
            signature = CallSignature.of(
                tensors,
                activation,
                config,
                dtype=dtype,
                seed=seed,
                place=Place(
                    trains=train,
                    steered=steered,
                    known=steered or self.registered.number_of(tensors.gate_up_proj) is not None,
                    layer=number,
                    step=step,
                    microbatch=microbatch,
                ),
                drop=drop_now,
                policy=self._policy_state,
            )
        except Exception as error:  # Whatever it is: the other ranks must not wait for this one.
            self._agreement.refuse(exchange, error, tensors.x_TD)
        owned = tensors.owned.to(dtype)
        loads = self._agreement.gather(exchange, signature, own, stale=self.store.is_stale(number, owned))
        with exchange.phase("plan"):
            plan, first = self._book.plan(
                loads.real_GE,
                loads.masked_GE,
                layer_key=(handle, number),
                layer=number,
                step=step,
                microbatch=microbatch,
                drop=drop_now,
                quota=config.quota,
                training=train,
            )
            banks, shipping = self.store.arrange(plan, number, loads.stale)
            layout = lay_out(plan, own.pair_L, own.masked_N, loads.masked_GE, self.rank, banks, shipping)
        if first:
            self._balance.add(plan)
            if self.trace is not None:
                self.trace(layer, step, max(microbatch, 0), plan.lam_GE)
        # While nothing is dropped nothing is missing.
        remainder = config.remainder if drop_now > 0 else "none"
        completed = train and remainder == "mean"
        dispatched = Dispatched(
            layout=layout,
            exchange=exchange,
            store=self.store,
            recipe=replace(Recipe.of(config, activation), remainder=remainder),
            load_E=plan.lam_GE.sum(0).to(tensors.x_TD.device),
            quota_E=plan.quota_EG.sum(1).to(tensors.x_TD.device),
            position=(seed, step, layer, max(microbatch, 0)),
            gradient_divisor=self.gradient_divisor,
            meter=Meter.find(handle),
            train=train,
            recording=loads.recording,
            # With the position: a recompute that took itself for another forward differs as well.
            fingerprint=routing_fingerprint(own.ids_TK, own.real_ids_TK) + hash((step, microbatch, layer)) % 2**61,
            masked=bool(loads.masked_GE.any()),
            sums=GradientSums.of(plan, self.rank, banks, tensors.x_TD.device) if completed else None,
            sequence_T=moment.sequence_T,
        )
        return run_experts(tensors.x_TD, tensors.topk_weights_TK, owned, tensors.token_mask_T, dispatched)
