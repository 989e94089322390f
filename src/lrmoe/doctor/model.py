"""A model put through training steps: against its stock experts, against the loop, and whether its experts learn."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lrmoe.config import LRMoEConfig
from lrmoe.doctor.measure import Failed, Gradients, require_close
from lrmoe.experts.meter import BackwardCall, recording
from lrmoe.experts.reference import reference_experts
from lrmoe.hosts.attach import attach

# Of a gradient's largest entry. Two orders of summation differ by 1e-6 in fp32, a wrong formula by 1e-2 or more.
_TOLERANCE = 1e-4


def load(model: str, device: str) -> nn.Module:
    from lrmoe.training.models import load_model

    loaded: nn.Module = load_model(model, seed=0)[0]
    return loaded.to(device).train()


def layers_found(model: nn.Module) -> str:
    try:
        recal = attach(model, LRMoEConfig(drop=0.0))
    except ValueError as error:
        raise Failed(str(error)) from error
    names = list(recal.layers)
    recal.detach()
    return f"{len(names)}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to run a training step."""

    checkpointing: bool | None = None  # use_reentrant, or None for none
    autocast: bool = False
    compile: bool = False

    def __str__(self) -> str:
        parts = []
        if self.checkpointing is not None:
            parts.append("checkpointing" + (" (reentrant)" if self.checkpointing else ""))
        if self.autocast:
            parts.append("autocast bfloat16")
        if self.compile:
            parts.append("torch.compile")
        return ", " + " and ".join(parts) if parts else ""


def ways(model: nn.Module, compile: bool) -> Iterator[Way]:
    kinds: list[bool | None] = [None]
    if getattr(model, "supports_gradient_checkpointing", False):
        kinds += [False, True]
    for autocast in (False, True):
        for kind in kinds:
            yield Way(checkpointing=kind, autocast=autocast)
    if compile:
        yield Way(compile=True)


class Patient:
    """A model, the batch it is examined with, and what the stock experts make of it."""

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.device = device
        vocabulary = self.model.config.get_text_config().vocab_size
        tokens = torch.randint(
            0, vocabulary, (2, 48), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu"
        )
        mask = torch.ones_like(tokens)
        mask[1, 40:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        self.batch: dict[str, Any] = {name: tensor.to(device) for name, tensor in batch.items()}
        if hasattr(self.model.config, "output_router_logits"):
            # Reentrant checkpointing loses the auxiliary loss of Transformers' models, whatever the experts.
            self.batch["output_router_logits"] = False
        self._plain: dict[bool, Gradients] = {}
        self._stock_step: tuple[Tensor, Gradients] | None = None
        self._exact_step: tuple[Tensor, Gradients] | None = None

    def loss_equals_stock(self) -> str:
        (loss, _), (stock_loss, _) = self._exact(), self._stock()
        difference = float((loss - stock_loss).abs() / stock_loss.abs())
        if not difference <= 1e-5:
            raise Failed(f"loss {float(loss):.6f}, with the stock experts {float(stock_loss):.6f}")
        return f"{float(loss):.6f}, relative difference {difference:.0e}"

    def gradients_equal_stock(self) -> str:
        return require_close(self._exact()[1], self._stock()[1], limit=_TOLERANCE)

    def gradients_equal_loop(self, config: LRMoEConfig) -> str:
        recal = attach(self.model, config)
        try:
            with recording() as calls:
                _, found = self._gradients()
            by_layer = {call.layer: call for call in calls}
            modules = {module: by_layer[i] for i, module in enumerate(recal.modules().values()) if i in by_layer}
            with self._looped(modules, config):
                _, expected = self._gradients()
        finally:
            recal.detach()
        kept = sum(int(call.kept_TK.sum()) for call in calls) / sum(int(call.load_E.sum()) for call in calls)
        return f"{require_close(found, expected, limit=_TOLERANCE)}, {kept:.1%} of the pairs kept"

    def experts_learn(self, config: LRMoEConfig, way: Way) -> str:
        """One step of plain SGD moves every expert that kept a pair, and no expert that kept none."""
        before = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        recal = attach(self.model, config)
        try:
            _, gradients = self._gradients(way, keep=True)
            # Far enough for the least gradient to show beside its weight.
            torch.optim.SGD(self.model.parameters(), lr=1e4).step()
            # A row of means is also an expert's that kept nothing.
            reached = "load" if config.remainder == "mean" and config.drop > 0 else "kept"
            kept = {name: read[reached] for name, read in recal.metrics()["layers"].items()}
            if kept.keys() != recal.layers.keys():
                raise Failed(f"no backward reached {', '.join(sorted(recal.layers.keys() - kept.keys()))}")
            return self._compare_moved(before, kept) + self._same_as_plain(way, gradients)
        finally:
            recal.detach()
            self.model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, weight in self.model.named_parameters():
                    weight.copy_(before[name])

    def _compare_moved(self, before: Gradients, kept: dict[str, list[int]]) -> str:
        moving = resting = 0
        for name, pairs in kept.items():
            kept_E = torch.tensor(pairs, device=self.device) > 0
            for part, weight in self.model.get_submodule(name).named_parameters():
                moved_E = (weight.detach() != before[f"{name}.{part}"]).flatten(1).any(dim=1)
                for wrong_E, what in (
                    (kept_E & ~moved_E, "kept pairs but did not move"),
                    (moved_E & ~kept_E, "kept no pair but moved"),
                ):
                    if wrong_E.any():
                        raise Failed(f"{name}.{part}: experts {wrong_E.nonzero().flatten().tolist()} {what}")
            moving, resting = moving + int(kept_E.sum()), resting + int((~kept_E).sum())
        return f"{moving} kept pairs and moved, {resting} kept none and did not"

    def _same_as_plain(self, way: Way, gradients: Gradients) -> str:
        """Checkpointing must not change a bit, on a CPU, of what the same step gives without it."""
        if way.checkpointing is None:
            if not way.compile:
                self._plain[way.autocast] = gradients
            return ""
        if self.device != "cpu" or way.autocast not in self._plain:
            return ""
        plain = self._plain[way.autocast]
        different = [name for name in plain if not torch.equal(plain[name], gradients[name])]
        if different:
            raise Failed(f"{len(different)} gradients differ from those without checkpointing, e.g. {different[0]}")
        return "; every bit as without checkpointing"

    def _stock(self) -> tuple[Tensor, Gradients]:
        if self._stock_step is None:
            self._stock_step = self._gradients()
        return self._stock_step

    def _exact(self) -> tuple[Tensor, Gradients]:
        if self._exact_step is None:
            recal = attach(self.model, LRMoEConfig(drop=0.0))
            try:
                self._exact_step = self._gradients()
            finally:
                recal.detach()
        return self._exact_step

    def _gradients(self, way: Way | None = None, *, keep: bool = False) -> tuple[Tensor, Gradients]:
        """The loss and the gradients of one step; whatever the model draws (dropout, jitter) is the same each time."""
        way = Way() if way is None else way
        self.model.zero_grad(set_to_none=True)
        call = torch.compile(self.model) if way.compile else self.model
        device = torch.device(self.device)
        autocast = torch.autocast(device.type, dtype=torch.bfloat16) if way.autocast else nullcontext()
        generators = [] if device.type == "cpu" else [torch.cuda.current_device()]
        with torch.random.fork_rng(devices=generators), self._checkpointed(way):
            torch.manual_seed(0)
            with autocast:
                loss = call(**self.batch).loss
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        if not keep:
            self.model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    @contextmanager
    def _checkpointed(self, way: Way) -> Iterator[None]:
        if way.checkpointing is None:
            yield
            return
        # Older releases have the second name only.
        kind = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        getattr(self.model, f"{kind}_checkpointing_enable")({"use_reentrant": way.checkpointing})
        try:
            yield
        finally:
            getattr(self.model, f"{kind}_checkpointing_disable")()

    @contextmanager
    def _looped(self, modules: dict[nn.Module, BackwardCall], config: LRMoEConfig) -> Iterator[None]:
        """The experts as a plain loop that keeps and weights the recorded pairs."""
        mask_T: Tensor = self.batch["attention_mask"].bool().reshape(-1)
        for module, call in modules.items():
            # Set on the instance, where it hides the class's.
            object.__setattr__(module, "forward", functools.partial(_loop, module, call, mask_T, config))
        try:
            yield
        finally:
            for module in modules:
                object.__delattr__(module, "forward")


def _loop(
    module: Any, call: BackwardCall, mask_T: Tensor, config: LRMoEConfig, x_TD: Tensor, ids_TK: Tensor, alpha_TK: Tensor
) -> Tensor:
    from lrmoe.hosts.expert_modules import activation_of, weights

    gate_up_proj, down_proj = weights(module)
    out_TD = reference_experts(
        x_TD,
        ids_TK,
        alpha_TK,
        gate_up_proj,
        down_proj,
        activation=activation_of(module),
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        pair_weight_TK=call.weight_TK,
        live_TK=mask_T.unsqueeze(-1).expand_as(ids_TK),
        router_grad=config.router_grad,
        remainder=config.remainder,
    )
    return out_TD.to(x_TD.dtype)
