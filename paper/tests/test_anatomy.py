"""The anatomy study: its measurements against independent ones, its cells, and what it concludes from rows."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
import transformers
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.hosts.expert_modules import weights
from lrmoe.recalibration.quota import quotas
from lrmoe.studies.catalog import run_named
from lrmoe.studies.regimes import UNGUARDED, regime
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import Variant
from lrmoe.training.models import load_weights
from lrmoe.training.run import prepare, train
from paper.anatomy.conclusions import conclude
from paper.anatomy.probe import Setting, probe
from paper.anatomy.study import AnatomyConfig, anatomy, check_cells, work_left
from paper.anatomy.tables import values
from paper.catalog import CATALOG

transformers.utils.logging.disable_progress_bar()
STEP = 7


def setting(name: str, **changes: Any) -> Setting:
    config = replace(UNGUARDED, drop=0.5, selector=name, **changes)
    return Setting(variant=name, rate=0.5, router_grad=config.router_grad, config=config, alone=True)


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    return [tiny_transformers.batch(seed=i) for i in range(count)]


def of(records: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
    (found,) = [record for record in records if all(record[key] == value for key, value in asked.items())]
    return found


def square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def contributions(model: Any, recal: Any, batch: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """Of each pair of a layer: alpha g phi^T (T*K, D, F), and its expert; from a plain loop."""
    module = list(recal.modules().values())[layer]
    seen: dict[str, Any] = {}

    def keep(_: Any, args: Any, out: Tensor) -> None:
        seen["x"], seen["ids"], seen["alpha"] = (value.detach() for value in args)
        out.register_hook(lambda grad: seen.__setitem__("g", grad))

    handle = module.register_forward_hook(keep)
    model(**batch).loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    gate_up, _ = weights(module)
    pairs, experts = [], []
    for token, row in enumerate(seen["ids"].tolist()):
        for choice, expert in enumerate(row):
            h = seen["x"][token] @ gate_up[expert].T
            if module.has_bias:
                h = h + module.gate_up_proj_bias[expert]
            phi = module._apply_gate(h.unsqueeze(0)).squeeze(0)
            pairs.append(seen["alpha"][token, choice] * torch.outer(seen["g"][token], phi))
            experts.append(expert)
    return torch.stack(pairs).detach(), torch.tensor(experts)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_terms_of_a_layer_equal_those_of_a_loop_over_pairs(architecture: str) -> None:
    model = tiny_transformers.build(architecture)
    recal = lrmoe.attach(model, UNGUARDED)
    data = batches()
    found = probe(model, recal, data, [setting("topq")], step=STEP)
    for layer in (0, 1):
        expected = dict.fromkeys(("importance", "gradient", "dropped_importance", "dropped_sum"), 0.0)
        for batch in data:
            pair_NDF, expert_N = contributions(model, recal, batch, layer)
            r_N = pair_NDF.flatten(1).double().square().sum(1)
            load_E = torch.bincount(expert_N, minlength=6)
            for expert, quota in enumerate(quotas("expert", load_E, 0.5).tolist()):
                mine_N = (expert_N == expert).nonzero().squeeze(-1)
                left_N = mine_N[r_N[mine_N].argsort(descending=True)][quota:]
                expected["importance"] += float(r_N[mine_N].sum()) / 2
                expected["gradient"] += square(pair_NDF[mine_N].sum(0)) / 2
                expected["dropped_importance"] += float(r_N[left_N].sum()) / 2
                expected["dropped_sum"] += square(pair_NDF[left_N].sum(0)) / 2
        told = of(found["alone"], layer=layer)
        assert {key: told[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_identity_of_the_error_holds_for_kept_weights_of_one_and_not_for_others() -> None:
    model = tiny_transformers.build("qwen3_moe")
    recal = lrmoe.attach(model, UNGUARDED)
    found = probe(model, recal, batches(), [setting("topq"), setting("pps")], step=STEP)
    for layer in (None, 0, 1):
        about = values(found, variant="topq", rate=0.5, layer=layer)
        product = about["tail"] * about["coherence"] * about["alignment"]
        assert product == pytest.approx(about["alone"], rel=1e-4)
        about = values(found, variant="pps", rate=0.5, layer=layer)
        assert about["tail"] * about["coherence"] * about["alignment"] != pytest.approx(about["alone"], rel=1e-2)
    # All selectors fill the same quotas, so V* is the same.
    assert values(found, variant="topq", rate=0.5)["variance"] == pytest.approx(about_variance(found), rel=1e-6)


def about_variance(found: dict[str, Any]) -> float:
    return float(values(found, variant="pps", rate=0.5)["variance"])


@pytest.mark.parametrize("kind", ["sum_rule", "kept"])
def test_errors_equal_those_of_a_model_attached_with_the_setting(kind: str) -> None:
    model = tiny_transformers.build("qwen3_moe")
    other = copy.deepcopy(model)
    data = batches(3)
    measured = setting("pps", router_grad=kind)
    found = probe(model, lrmoe.attach(model, UNGUARDED), data, [measured], step=STEP)
    exact = [tiny_transformers.gradients(other, batch)[1] for batch in data]
    attached = lrmoe.attach(other, measured.config)
    attached.set_step(STEP)
    dropped = [tiny_transformers.gradients(other, batch)[1] for batch in data]
    names = {"down": "experts.down_proj", "gate_up": "experts.gate_up_proj", "router": "gate.weight"}
    for layer in (0, 1):
        for weight, end in names.items():
            name = f"model.layers.{layer}.mlp.{end}"
            errors = [b[name] - a[name] for a, b in zip(exact, dropped, strict=True)]
            told = of(found["errors"], layer=layer, weight=weight)
            assert told["one"] == pytest.approx(sum(map(square, errors)) / 3, rel=1e-3) != 0
            assert told["mean"] == pytest.approx(square(sum(errors)) / 9, rel=1e-3)
            told = of(found["exact"], layer=layer, weight=weight)
            mean = sum(a[name] for a in exact) / 3
            assert told["mean_gradient"] == pytest.approx(square(mean), rel=1e-3)
            assert told["noise"] == pytest.approx(sum(square(a[name] - mean) for a in exact) / 2, rel=1e-3)
    with torch.no_grad():
        losses = [float(other(**batch, output_router_logits=False).loss) for batch in data]
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_a_probe_leaves_model_generator_and_recalibrator_as_they_were() -> None:
    model = tiny_transformers.build("qwen3_moe").eval()
    model.lm_head.weight.requires_grad_(False)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.25, seed=3))
    recal.set_step(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, rng = recal.state_dict(), torch.get_rng_state()
    position = recal.clock.position_3.clone()
    probe(model, recal, batches(), [setting("pps")], step=STEP)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert recal.state_dict() == state
    assert torch.equal(recal.clock.position_3, position)
    assert float(recal.clock.drop) == 0.25
    assert not model.training
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert recal.metrics()["layers"] == {}
    with pytest.raises(ValueError, match="batches=1 must be at least 2"):
        probe(model, recal, batches(1), [setting("pps")], step=STEP)


@pytest.mark.parametrize(("mean", "share", "crossing"), [(1.0, 1.0, 8.0), (0.25, 0.0, None), (0.5, 1 / 3, 24.0)])
def test_share_of_the_error_that_all_batches_have_in_common(mean: float, share: float, crossing: float | None) -> None:
    # Four batches with a squared error of 1: equal errors keep it in the mean, unrelated ones keep a quarter.
    about = {"layer": 0, "weight": "down"}
    record = {
        "loss": 2.0,
        "batches": 4,
        "exact": [{**about, "gradient": 10.0, "mean_gradient": 4.0, "noise": 8.0}],
        "errors": [{**about, "variant": "topq", "rate": 0.2, "router_grad": "sum_rule", "one": 1.0, "mean": mean}],
        "alone": [],
    }
    found = values(record, variant="topq", rate=0.2, weights=("down",))
    assert found["systematic"] == pytest.approx(share, abs=1e-12)
    assert found["crossing"] == (None if crossing is None else pytest.approx(crossing))
    assert (found["one"], found["mean"], found["noise"]) == (0.1, mean / 4, 2.0)
    assert "tail" not in found


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AnatomyConfig]:
    """A study of 20 steps from scratch and 10 near zero loss, two batches a probe."""
    folder = tmp_path_factory.mktemp("anatomy")
    tiny_transformers.build("qwen3_moe", std=0.02).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("".join(f"line {i} says {i * i % 97} and {i * 31 % 89}\n" for i in range(300)))
    model, text = str(folder / "model"), str(folder / "text.txt")
    study = StudyConfig(model=model, text=text, steps=20, batch=2, seq=32, memorize_bytes=256, seeds=(0,))

    def make(**changes: Any) -> AnatomyConfig:
        own = {key: changes.pop(key) for key in list(changes) if key in StudyConfig.__dataclass_fields__}
        defaults = {"probe_steps": (2, 20), "later_probe_steps": (10,), "batches": 2, "rates": (0.2,)}
        defaults |= {"router_rates": (0.2,), "router_variants": ("pps",)}
        return AnatomyConfig(study=replace(study, **own), **{**defaults, **changes})

    return make


@pytest.fixture(scope="session")
def whole(small: Callable[..., AnatomyConfig], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished study."""
    out = tmp_path_factory.mktemp("whole")
    return out, anatomy(small(), out)


def test_result_has_a_row_for_every_probe_and_plain_values(whole: tuple[Path, Any]) -> None:
    _, result = whole
    tables = {table.name: table for table in result.tables}
    assert list(tables) == ["pairs", "errors", "rates", "layers", "router"]
    places = [("scratch", 2), ("scratch", 20), ("near_zero", 10)]
    assert list(dict.fromkeys((row["regime"], row["step"]) for row in tables["pairs"].rows)) == places
    assert len(tables["pairs"].rows) == len(tables["errors"].rows) == 3 * 4
    assert len(tables["layers"].rows) == 3 * 2 * 2
    assert [row["router_grad"] for row in tables["router"].rows] == ["sum_rule", "exact", "kept"] * 3
    for table in result.tables:
        keys = {column.key for column in table.columns}
        assert all(keys <= set(row) for row in table.rows)
    topq = next(row for row in tables["pairs"].rows if row["variant"] == "topq")
    assert topq["tail"] * topq["coherence"] * topq["alignment"] == pytest.approx(topq["alone"], rel=1e-4)
    assert {figure.name for figure in result.figures} == {
        f"{kind}-{place}" for kind in ("variance", "coherence", "errors") for place in ("scratch", "near_zero")
    }
    assert result.conclusions
    assert result.advice
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "study"


def test_a_probed_run_is_the_unprobed_run_bit_for_bit(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path
) -> None:
    out, _ = whole
    cell = regime("scratch", small().study).cell(UNGUARDED, 0)
    train(prepare(replace(cell.config, threads=1), tmp_path / "run"))
    probed, plain = (
        load_weights(folder / "checkpoints" / "checkpoint-20").state_dict()
        for folder in (cell.folder(out / "cells"), tmp_path / "run")
    )
    assert all(torch.equal(probed[name], plain[name]) for name in plain)


def records(out: Path) -> dict[str, Any]:
    """The finished cells of runs from scratch, by file."""
    found = {path.name: json.loads(path.read_text()) for path in (out / "cells").glob("scratch-*.json")}
    return {name: {**record, "seconds": 0} for name, record in found.items()}


def test_what_is_finished_is_not_done_again(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path
) -> None:
    config = small(regimes=("scratch",))
    first: dict[str, int] = {}
    then: dict[str, int] = {}

    def stop_at_second_probe(name: str, step: int, record: Any) -> None:
        first[name] = step
        if name.endswith("step 20"):
            raise KeyboardInterrupt

    total = work_left(config, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        anatomy(config, tmp_path, progress=stop_at_second_probe)
    left = work_left(config, tmp_path)
    anatomy(config, tmp_path, progress=lambda name, step, record: then.__setitem__(name, step))
    # The run had left its weights, and its first probe its record.
    assert [name.split()[0] for name in first] == ["train", "probe", "probe"]
    assert list(then) == ["probe scratch seed 0 step 20"]
    assert sum(then.values()) == left < total
    assert records(tmp_path) == records(whole[0])
    assert len(records(tmp_path)) == 2
    assert not list(tmp_path.rglob("weights-*"))
    then.clear()
    # Another probe of a finished run, whose weights are gone: it is done again, the other cells are not.
    more = small(regimes=("scratch",), probe_steps=(2, 3, 20))
    anatomy(more, tmp_path, progress=lambda name, step, record: then.__setitem__(name, step))
    assert [name.split()[0] for name in then] == ["train", "probe"]
    assert records(whole[0]).items() <= records(tmp_path).items()
    assert len(records(tmp_path)) == 3


def test_runs_near_zero_loss_begin_with_the_last_weights_from_scratch(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig]
) -> None:
    out, _ = whole
    cell = regime("near_zero", small().study).cell(UNGUARDED, 0)
    config = json.loads((cell.folder(out / "cells") / "config.json").read_text())
    assert cell.start is not None
    assert config["train"]["model"] == str(cell.start.folder(out / "cells").resolve())
    assert cell.start.key == regime("scratch", small().study).cell(UNGUARDED, 0).key


def cut(record: dict[str, Any]) -> None:
    del record["errors"][3]


def without(part: str, term: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record[part][1].pop(term)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold one JSON object"),
        ("", "cannot be read as JSON"),
        ({"loss": None}, r"damaged .*\(loss=None must be a number\)"),
        ({"seconds": "3"}, r"\(seconds='3' must be a number\)"),
        ({"batches": 3}, r"\(batches=3 must be 2\)"),
        ({"exact": {}}, r"\(exact=\{\} must be a list of objects\)"),
        ({"exact": []}, r"\(exact has no entry of 0, down\)"),
        ({"errors": [3]}, r"\(errors=\[3\] must be a list of objects\)"),
        (cut, r"\(errors has no entry of pps, 0.2, sum_rule, 1, down\)"),
        (without("exact", "noise"), r"\(exact\[1\]\.noise is missing\)"),
        (without("errors", "rate"), r"\(errors\[1\]\.rate is missing\)"),
        (without("alone", "variance"), r"\(alone\[1\]\.variance is missing\)"),
        (lambda record: record["alone"][0].update(error="0.5"), r"\(alone\[0\]\.error='0.5' must be a number with"),
        (lambda record: record["alone"].append(record["alone"][0]), r"\(alone\[8\] is there twice\)"),
    ],
)
def test_a_damaged_cell_is_named_with_its_mend_before_anything_is_trained(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path, damage: Any, said: str
) -> None:
    store = tmp_path / "cells"
    store.mkdir()
    (finished,) = (whole[0] / "cells").glob("near_zero-seed0-step10-*.json")
    damaged = store / finished.name
    record = json.loads(finished.read_text())
    if isinstance(damage, str):
        damaged.write_text(damage)
    else:
        record.update(damage) if isinstance(damage, dict) else damage(record)
        damaged.write_text(json.dumps(record))
    mend = "; delete it, and the probe is made again"
    with pytest.raises(ValueError, match=rf"{re.escape(str(damaged))} .*{said}.*{mend}"):
        check_cells(small(), tmp_path)
    with pytest.raises(ValueError, match=mend):
        anatomy(small(), tmp_path)
    assert sorted(path.name for path in store.iterdir()) == [finished.name]
    shutil.copy(finished, damaged)
    check_cells(small(), tmp_path)


def test_damaged_runs_and_weights_are_named_with_their_mend(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path
) -> None:
    shutil.copytree(whole[0] / "cells", tmp_path / "cells")
    cell = regime("scratch", small().study).cell(UNGUARDED, 0)
    folder = cell.folder(tmp_path / "cells")
    (probed,) = (tmp_path / "cells").glob("scratch-seed0-step2-*.json")
    probed.unlink()
    torch.save({"weight": torch.zeros(100)}, folder / "weights-2.pt")
    check_cells(small(), tmp_path)
    content = (folder / "weights-2.pt").read_bytes()
    for part in (content[:200], b""):
        (folder / "weights-2.pt").write_bytes(part)
        with pytest.raises(ValueError, match=r"weights-2\.pt cannot be read \(.*delete it, and the run is done again"):
            check_cells(small(), tmp_path)
    (folder / "weights-2.pt").unlink()
    (folder / "summary.json").write_text('{"seconds": 1.0}')
    with pytest.raises(ValueError, match=r"summary\.json is damaged .* is missing\); delete the folder .*exact-seed0"):
        check_cells(small(), tmp_path)


def test_a_run_that_its_probes_no_longer_need_may_be_gone(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path
) -> None:
    (tmp_path / "cells").mkdir()
    for finished in (whole[0] / "cells").glob("*.json"):
        shutil.copy(finished, tmp_path / "cells")
    assert work_left(small(), tmp_path) == 0
    result = anatomy(small(), tmp_path)
    assert (result.tables, result.conclusions) == (whole[1].tables, whole[1].conclusions)
    assert "training_seconds" in whole[1].provenance
    assert "training_seconds" not in result.provenance


def test_the_study_by_name_writes_its_files_and_nothing_where_a_cell_is_damaged(
    whole: tuple[Path, Any], small: Callable[..., AnatomyConfig], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "cells").mkdir()
    for finished in (whole[0] / "cells").glob("*.json"):
        shutil.copy(finished, tmp_path / "cells")
    config = small()
    given = {name: getattr(config, name) for name in ("probe_steps", "later_probe_steps", "batches", "rates")}
    given |= {"router_rates": (0.2,), "router_variants": ("pps",), **config.study.given()}
    damaged = next((tmp_path / "cells").glob("near_zero-*.json"))
    content = damaged.read_text()
    damaged.write_text(content[: len(content) // 2])
    with pytest.raises(ValueError, match="; delete it, and the probe is made again"):
        run_named("anatomy", given, tmp_path, store=tmp_path / "unused", catalog=CATALOG)
    assert [path.name for path in tmp_path.iterdir()] == ["cells"]
    damaged.write_text(content)
    result = run_named("anatomy", given, tmp_path, store=tmp_path / "unused", catalog=CATALOG)
    assert result.tables == whole[1].tables
    assert "python -m paper anatomy" in result.provenance["command"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cells", "config.json", "metrics.jsonl", "summary.json", "table.md")
    }
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["study"], stored["settings"]["batches"]) == ("anatomy", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": 1}, "batches=1 must be an integer >= 2"),
        ({"rates": (0.0,)}, "rates=0.0 must be above 0 and below 1"),
        ({"rates": (0.2, 0.2)}, r"rates=\[0.2, 0.2\] must be different"),
        ({"rates": ()}, r"rates=\[\] measures nothing"),
        ({"router_rates": (1.5,)}, "router_rates=1.5 must be above 0"),
        ({"probe_steps": (21,)}, "probe_steps=21 is past the end of the run"),
        ({"later_probe_steps": (11,)}, "later_probe_steps=11 is past the end of the run"),
        ({"probe_steps": (0,)}, "probe_steps=0 must be an integer >= 1"),
        ({"router_variants": ("best",)}, "router_variants='best' is none of the variants"),
        ({"variants": ()}, r"variants=\[\] must be one or more"),
        ({"variants": (Variant(name="a", settings={"drop": 0.1}),)}, "variant 'a': drop cannot be set"),
        ({"variants": (Variant(name="a", settings={"selector": "best"}),), "router_variants": ()}, "selector='best'"),
    ],
)
def test_bad_settings_are_told(small: Callable[..., AnatomyConfig], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def spread(one: float) -> dict[str, float]:
    return {"one": one, "one_low": one * 0.8, "one_high": one * 1.2}


def made_up(title: str, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows of one regime in which topq is biased and pps is not."""
    place = {"title": title, "step": 600, "loss": 2.0}
    pair = {"tail": 0.02, "coherence": 3.0, "variance": 0.05, "alignment": 0.5, "alone": 0.03, "alone_variance": 0.05}
    top = {"one": 0.04, "mean": 0.03, "mean_low": 0.029, "mean_high": 0.031, "systematic": 0.7, "crossing": 40.0}
    pps = {"one": 0.05, "mean": 0.003, "mean_low": 0.002, "mean_high": 0.004, "systematic": -0.01, "crossing": None}
    router = {"rate": 0.2, "variant": "pps"}
    kinds = {"sum_rule": 0.1, "exact": 0.09, "kept": 0.8}
    return {
        "pairs": [{**place, **pair, "variant": "topq", **changes}, {**place, **pair, "variant": "pps", **changes}],
        "errors": [{**place, **top, "variant": "topq", **changes}, {**place, **pps, "variant": "pps"}],
        "router": [
            {**place, **router, "router_grad": kind, **spread(one), "crossing": 50.0} for kind, one in kinds.items()
        ],
    }


def test_conclusions_follow_from_the_rows() -> None:
    said, advice = conclude(made_up("From scratch"), rate=0.2, batches=16, seeds=3)
    text = " ".join(said)
    assert "hold 2.00% of ΣR, with a coherence of 3.0" in text
    assert "topq 0.04 and 0.03 (70% in common); pps 0.05 and 0.003 (0% in common)" in text
    assert "averaged over 40 batches" in text
    assert "is 1.00 to 1.00 times what V* predicts" in text
    assert "0.1 of its square with sum_rule, with exact 0.09, with kept 0.8, 8.0 times that of sum_rule" in text
    assert "From scratch: at 20% prefer pps to topq" in advice[0]
    assert "10.0 times smaller, and smaller for every seed" in advice[0]
    assert any("do not take kept; take sum_rule" in one and "once 50 batches are averaged." in one for one in advice)
    assert any("limit for pps (V*/ΣR 0.1) is above everything" in one for one in advice)
    assert any(
        "limit for topq" in one and "in 1 of 1 probes; the highest, of all layers together, is 0.02" in one
        for one in advice
    )


def test_other_rows_give_other_conclusions() -> None:
    rows = made_up("Near zero loss", mean=0.0001, mean_low=0.0001, mean_high=0.0002, tail=0.001, variance=0.2)
    advice = conclude(rows, rate=0.2, batches=16, seeds=1)[1]
    assert "prefer topq to pps" in advice[0]
    assert "for the one seed measured" in advice[0]
    assert any("limit for pps (V*/ΣR 0.1) to stop drops of 20%" in one for one in advice)
    assert any("limit for topq (the dropped share of ΣR 0.005) is above" in one for one in advice)
    advice = conclude(made_up("Near zero loss", mean_low=0.003), rate=0.2, batches=16, seeds=3)[1]
    assert "overlap over the seeds" in advice[0]
    rows["router"][2] |= {"one": 0.01, "one_low": 0.01, "one_high": 0.01}
    assert any("take kept rather than sum_rule" in one for one in conclude(rows, rate=0.2, batches=16, seeds=3)[1])
    rows["router"][1] |= spread(0.001)
    rows["router"][2] |= spread(0.2)
    said = conclude(rows, rate=0.2, batches=16, seeds=3)[1]
    assert any("or exact" in one and "has 100 times less squared error" in one for one in said)
    both = {key: [*made_up("From scratch")[key], *rows[key]] for key in rows}
    said = conclude(both, rate=0.2, batches=16, seeds=3)[0]
    assert any(
        "300.0 times as large in the regime “from scratch”" in one and "the dropped share of ΣR differs" in one
        for one in said
    )


def test_conclusions_do_without_what_was_not_measured() -> None:
    rows = {key: [row for row in rows if row["variant"] != "topq"] for key, rows in made_up("From scratch").items()}
    said, advice = conclude({**rows, "router": []}, rate=0.2, batches=16, seeds=3)
    assert not any("topq" in sentence for sentence in (*said, *advice))
    assert said


def test_w7_the_anatomy_of_one_seed_prefers_no_selector() -> None:
    rows = [
        {"title": "A", "step": 1, "variant": name, "one": 1.0, "systematic": None, "crossing": None, "mean": mean,
         "mean_low": mean, "mean_high": mean}
        for name, mean in (("topq", 0.5), ("pps", 0.1))
    ]  # fmt: skip
    for seeds, prefers in ((1, False), (3, True)):
        tables: dict[str, Any] = {"errors": rows, "pairs": [], "router": []}
        _, advised = conclude(tables, rate=0.2, batches=4, seeds=seeds)
        assert any("at 20% prefer pps" in sentence for sentence in advised) == prefers
