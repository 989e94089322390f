"""Whether the experts are those of the checkpoint that the Trainer says it has loaded: on resuming, and for the best
model at the end.

The Trainer loads by name what ``save_pretrained`` has written under other names, and lists the missing keys in a
warning that is easily passed over. :mod:`lrmoe.hosts.per_expert_weights` makes that loading whole; here is checked that
it was.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.training_args import TrainingArguments

from lrmoe import strict_json
from lrmoe.control import Recalibrator
from lrmoe.experts.stored_weights import partitioned_by
from lrmoe.hosts.per_expert_weights import fillable, is_hooked, named_tensors

logger = logging.getLogger("lrmoe")

_SAMPLES = 16

# Their checkpoints hold the model's parameters as they are, under its own names.
_OWN_FORMATS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def sample_weights(recal: Recalibrator) -> dict[str, list[float | str]]:
    """A few entries of each weight of each attached layer: enough to tell trained weights from others."""
    samples = {}
    with torch.no_grad():
        for layer, module in recal.modules().items():
            for name, weight in module.named_parameters():
                # A shard's entries belong to a layout that a resumed run need not have.
                if weight.numel() and not hasattr(weight, "placements") and partitioned_by(weight) is None:
                    places = torch.arange(_SAMPLES, device=weight.device) * (weight.numel() - 1) // (_SAMPLES - 1)
                    entries = weight.detach().reshape(-1)[places].double().tolist()
                    # As words where they are not finite: no NaN is equal to itself, and JSON knows none.
                    samples[f"{layer}.{name}"] = strict_json.spelled(entries)
    return samples


def check_resumed(
    stored: dict[str, list[float | str]], recal: Recalibrator, args: TrainingArguments, state: TrainerState
) -> None:
    """Checks that the attached layers have the weights of the checkpoint a run goes on from, and logs which it is.

    Args:
        stored: what :func:`sample_weights` gave when the checkpoint was saved.

    Raises:
        ValueError: naming a weight that differs, and the mend.
    """
    compared, different = _compare(stored, recal)
    if different:
        raise ValueError(
            f"{different[0].lstrip('.')} is not what it was when the checkpoint at step {state.global_step} was saved "
            f"({len(different)} weights differ): the Trainer has not restored the experts. Build the model with "
            "from_pretrained(<that checkpoint>), attach, then call train(resume_from_checkpoint=<that checkpoint>)"
        )
    folder = _folder_of(args, state)
    where = f"the checkpoint at step {state.global_step}" if folder is None else str(folder)
    checked = f"the {compared} weights of its MoE layers are those saved there"
    if compared == 0:
        checked = "its experts are sharded over ranks and were not compared with those saved there"
    elif folder is not None and any(folder.glob("*.index.json")):
        checked += "; that Transformers lists them as missing is because they are saved one by one"
    # A warning, because that is what Python shows by default, and what Transformers' list of missing keys is.
    logger.warning("training goes on from %s, step %d: %s", where, state.global_step, checked)


def check_best_can_be_loaded(args: TrainingArguments, recal: Recalibrator, model: nn.Module | None) -> None:
    """Checks, before training, that ``load_best_model_at_end`` will find all weights of the attached layers.

    Raises:
        ValueError: if it would leave some as the last step made them, naming one and the mend.
    """
    if not args.load_best_model_at_end or not isinstance(model, PreTrainedModel):
        return
    if AcceleratorState().distributed_type in _OWN_FORMATS:
        return
    expected = _expert_names(recal, model)
    lost = sorted(expected - _loaded(model))
    if lost:
        raise ValueError(
            f"load_best_model_at_end=True would end with mixed weights: the dense ones of the best step, but {lost[0]} "
            f"({len(lost)} weights) of the last, because Transformers saves experts under names that its Trainer does "
            "not load. Set load_best_model_at_end=False and load the best model with "
            "from_pretrained(trainer.state.best_model_checkpoint), or attach to the whole Transformers model"
        )


def report_best(args: TrainingArguments, state: TrainerState, recal: Recalibrator) -> None:
    """Logs, after training, whether the attached layers have the weights of the best checkpoint."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return
    folder = Path(state.best_model_checkpoint)
    stored = _saved_in(folder)
    if stored is None:
        return
    compared, different = _compare(stored["weights"], recal)
    # No error: the training is done, and the checkpoint is whole.
    if different:
        logger.error(
            "the model in memory is not the best one of %s: %s is not what was saved there (%d of %d weights of its "
            "MoE layers differ). Load it with from_pretrained(%r)",
            *(folder, different[0], len(different), compared, str(folder)),
        )
    elif compared:
        logger.info("best model: the %d weights of its MoE layers are those saved in %s", compared, folder)


def _compare(stored: dict[str, list[float | str]], recal: Recalibrator) -> tuple[int, list[str]]:
    """How many weights could be compared, and which differ."""
    here = sample_weights(recal)
    common = [name for name in stored if name in here]
    return len(common), [name for name in common if here[name] != stored[name]]


def _folder_of(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The folder a run goes on from. A callback is not told, so it is looked for where it may be, and recognised."""
    candidates = [Path(args.output_dir) / f"checkpoint-{state.global_step}"]
    if isinstance(args.resume_from_checkpoint, str):
        candidates.insert(0, Path(args.resume_from_checkpoint))
    here = state.stateful_callbacks.get("RecalibrationCallback")
    expected = here["attributes"]["saved"] if isinstance(here, dict) else None
    return next((folder for folder in candidates if expected is not None and _saved_in(folder) == expected), None)


def _saved_in(folder: Path) -> dict[str, Any] | None:
    """What the recalibration callback has saved in a checkpoint; None if there is no such thing."""
    try:
        stored = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        saved = stored["stateful_callbacks"]["RecalibrationCallback"]["attributes"]["saved"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return saved if isinstance(saved, dict) else None


def _expert_names(recal: Recalibrator, model: nn.Module) -> set[str]:
    """The names, in the Trainer's model, of the parameters of the attached layers that are trained."""
    ours = {id(p) for module in recal.modules().values() for p in module.parameters() if p.requires_grad}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ours}


def _loaded(model: PreTrainedModel) -> set[str]:
    """The names that a checkpoint of this model has, or that it is loaded under by the hooks."""
    own = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in named_tensors(model).items()
    }
    try:
        from transformers.core_model_loading import revert_weight_conversion

        saved: dict[str, Tensor] = revert_weight_conversion(model, own)
    except Exception as error:  # Of a library whose conversions are no settled interface.
        logger.debug("no names of a checkpoint of %s: %s", type(model).__name__, error)
        return set()
    loaded = own.keys() & saved.keys()
    for place, module in model.named_modules():
        if is_hooked(module):
            prefix = f"{place}." if place else ""
            inside = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
            loaded |= {prefix + name for name in fillable(module, inside)}
    return loaded
