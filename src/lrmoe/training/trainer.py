"""Transformers' Trainer as a run needs it: losses kept apart, checkpoints that appear whole, one process or several."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lrmoe.training import optimizer_state
from lrmoe.training.balance_loss import over_all_ranks
from lrmoe.training.checkpoints import STAGING, publish
from lrmoe.training.config import TrainConfig
from lrmoe.training.memory import measure_saved_bytes
from lrmoe.training.models import load_weights
from lrmoe.training.recorder import LossMeter, RunRecorder
from lrmoe.training.world import World


def training_arguments(config: TrainConfig, out: Path, world: World) -> TrainingArguments:
    """The Trainer's settings for a run; of a batch that several ranks share, each has its part."""
    # Renamed within the versions of Transformers that we take.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch // world.size,
        per_device_eval_batch_size=config.batch // world.size,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr,
        lr_scheduler_type="constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule,
        warmup_steps=config.lr_warmup_steps,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        **{checkpointing: config.gradient_checkpointing, f"{checkpointing}_kwargs": {"use_reentrant": False}},
        bf16=config.bf16,
        # Without an accelerator the Trainer accepts bf16 only if told that the CPU is meant.
        use_cpu=not torch.accelerator.is_available(),
        seed=config.seed,
        # The dataset is the order; a sampler of the Trainer's own would make it depend on more than the seed.
        train_sampling_strategy="sequential",
        # All ranks have as many tokens, so the mean of their means is the mean; the Trainer's way to it would multiply
        # the balancing loss by the number of ranks.
        average_tokens_across_devices=world.size == 1,
        logging_steps=config.log_every,
        # A loss that is not finite has to be seen, not averaged away.
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.eval_every,
        prediction_loss_only=True,
        save_steps=config.save_every,
        save_total_limit=config.keep_checkpoints,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        log_level_replica="passive",
        # Reporters are given as callbacks.
        report_to="none",
        disable_tqdm=True,
    )
    # One device: with several GPUs in sight the Trainer would wrap the model in DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class RunTrainer(Trainer):  # type: ignore[misc]
    """Transformers' Trainer; it tells the language-model loss from the balancing loss, leaves the latter out of
    validations, counts the first forward's saved bytes, resumes the experts' weights, and lets a checkpoint appear
    only when it is complete.

    Over several ranks, whose model Transformers has sharded, it also saves and resumes the optimizer, which the Trainer
    does not do for such a model, and computes the balancing loss and the validation over the ranks' common batch.
    """

    def __init__(
        self, *, world: World, losses: LossMeter, recorder: RunRecorder, moe_modules: list[nn.Module], **options: Any
    ) -> None:
        self._world = world
        self._losses = losses
        self._recorder = recorder
        self._moe_modules = moe_modules
        self._measured = False
        self._staging: Path | None = None
        # The Trainer refuses to save the optimizer of a sharded model; below we do.
        options["args"].save_only_model = world.size > 1
        super().__init__(**options)
        self.args.save_only_model = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        config = self.model.config.get_text_config()
        balanced = bool(getattr(config, "output_router_logits", False))
        if not model.training:
            inputs = {**inputs, "output_router_logits": False} if balanced else inputs
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with ExitStack() as stack:
            saved = None if self._measured else stack.enter_context(measure_saved_bytes(self.model, self._moe_modules))
            if balanced and self._world.size > 1:
                stack.enter_context(over_all_ranks(self.model))
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if saved is not None:
            self._measured = True
            self._recorder.saved_bytes = saved
        balance = outputs.get("aux_loss") if balanced else None
        share = loss.detach()
        if balance is not None:
            balance = balance.detach()
            share = share - config.router_aux_loss_coef * balance
        if not self.model_accepts_loss_kwargs:
            share = share / self.args.gradient_accumulation_steps
        self._losses.add(share, balance)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        if self._world.size == 1:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        metrics = {f"{metric_key_prefix}_loss": self._validation_loss()}
        self.log(metrics)
        handler = self.callback_handler
        self.control: Any = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _validation_loss(self) -> float:
        """The mean loss of all validation sequences. All ranks run equally often, since the experts of each wait for
        the tokens of all; where a rank has no sequence left it runs the first once more, for nothing."""
        sequences, total = self.eval_dataset, 0.0
        batch, rank = self.args.per_device_eval_batch_size, self._world.rank
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(sequences), batch * self._world.size):
                mine = range(start + rank * batch, min(start + (rank + 1) * batch, len(sequences)))
                rows = [sequences[i] for i in mine] or [sequences[0]]
                loss = self.compute_loss(self.model, self._prepare_inputs(self.data_collator(rows)))
                total += float(loss) * len(mine)
        self.model.train()
        return self._world.sum([total])[0] / len(sequences)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self._into_staging() as staging:
            super()._save_checkpoint(model, trial)
            self._world.barrier()
            if self._world.is_main:
                publish(staging, keep=self.args.save_total_limit)

    @contextmanager
    def _into_staging(self) -> Iterator[Path]:
        self._staging = Path(self.args.output_dir) / STAGING
        if self._world.is_main:
            shutil.rmtree(self._staging, ignore_errors=True)
        self._world.barrier()
        try:
            yield self._staging
        finally:
            self._staging = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else str(super()._get_output_dir(trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._world.size == 1:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer_state.save_shards(self.model, _bare(self.optimizer), Path(output_dir))
        if self._world.is_main:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or (self._world.size == 1 and optimizer_state.is_whole(Path(checkpoint))):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        decayed = set(self.get_decay_parameter_names(self.model))
        trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        names = [[name for name in trained if (name in decayed) is kind] for kind in (True, False)]
        optimizer_state.load(self.model, _bare(self.optimizer), Path(checkpoint), names)
        schedule = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        # One entry for each group of parameters, of which sharded models have more, all with the same learning rate.
        groups = len(self.optimizer.param_groups)
        schedule = {key: value[:1] * groups if isinstance(value, list) else value for key, value in schedule.items()}
        self.lr_scheduler.load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Checkpoints hold one tensor per expert, the model one for all of a layer's; the Trainer's own loading does
        # not convert, and only warns that the experts keep their initial weights. A sharded model was made from it.
        if self._world.size == 1:
            self.model.load_state_dict(load_weights(Path(resume_from_checkpoint)).state_dict(), strict=True)


_SCHEDULER = "scheduler.pt"


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
