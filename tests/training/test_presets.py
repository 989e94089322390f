"""The two architectures, and checkpoint folders good and bad."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lrmoe import LRMoEConfig, attach
from lrmoe.training.models import load_model
from lrmoe.training.presets import PRESETS


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_is_a_mixture_of_experts_in_most_of_its_weights(name: str) -> None:
    model, tokenizer = load_model(name, seed=0)
    recal = attach(model, LRMoEConfig())
    assert len(recal.layers) >= 3
    experts = sum(p.numel() for layer in recal.layers for p in model.get_submodule(layer).parameters())
    assert experts > 0.8 * sum(p.numel() for p in model.parameters())
    assert len(tokenizer) <= model.config.vocab_size
    config = model.config
    assert (config.num_local_experts, config.num_experts_per_tok) == (32, 4)
    # Grouped products on every device want rows of a multiple of 16 bytes in every dtype.
    assert config.hidden_size % 16 == 0
    assert config.moe_intermediate_size % 16 == 0


def test_glm_preset_has_what_tells_the_architecture_apart() -> None:
    model, _ = load_model("glm4-moe-tiny", seed=0)
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    assert not hasattr(first, "experts")
    assert second.shared_experts is not None
    assert second.gate.e_score_correction_bias.shape == (32,)
    assert (second.gate.num_group, second.gate.topk_group) == (4, 2)


def test_qwen_preset_trains_with_a_balancing_loss() -> None:
    model, _ = load_model("qwen3-moe-tiny", seed=0)
    ids = torch.arange(3, 67).unsqueeze(0)
    with torch.no_grad():
        balanced = model(input_ids=ids, labels=ids)
        plain = model(input_ids=ids, labels=ids, output_router_logits=False)
    assert float(balanced.loss - plain.loss) == pytest.approx(0.01 * float(balanced.aux_loss), rel=1e-3)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = load_model("qwen3-moe-tiny", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, _ = load_model("qwen3-moe-tiny", seed=3)
    third, _ = load_model("qwen3-moe-tiny", seed=4)
    weights = [m.model.layers[0].mlp.experts.down_proj for m in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_folder_gives_its_weights_in_float32(tiny_model: Path) -> None:
    model, _ = load_model(str(tiny_model), seed=9)
    stored = load_file(tiny_model / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["no-such-preset", "Qwen/Qwen3-30B-A3B", ""])
def test_unknown_name_lists_the_presets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"qwen3-moe-tiny, glm4-moe-tiny|no config\.json"):
        load_model(name, seed=0)


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def damage_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.7.self_attn.q_proj.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def shrink_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config, "cannot be loaded"),
        (damage_type, "cannot be loaded.*no-such-type"),
        (cut_weights, "cannot be loaded"),
        (remove_weights, "cannot be loaded"),
        (lose_a_weight, "1 missing keys.*q_proj"),
        (add_a_weight, "1 unexpected keys.*layers.7"),
        (break_tokenizer, "tokenizer.*cannot be loaded"),
        (shrink_vocabulary, "brings no tokenizer.*259 ids.*vocab_size=100"),
    ],
)
def test_damaged_folder_is_refused(tiny_model: Path, tmp_path: Path, damage: object, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as caught:
        load_model(str(folder), seed=0)
    assert "\n" not in str(caught.value)
