"""What fits, and what is recommended: each branch on a small model, and agreement with ``lrmoe balance``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lrmoe.balance import get
from lrmoe.cli import main
from lrmoe.cluster import Hardware, ModelShape, layer_time, memory
from lrmoe.studies.paper_config import FASTER
from lrmoe.studies.paper_loads import routing_for
from lrmoe.studies.plan import Case, Option, Planner, recommend, study
from lrmoe.studies.plan_config import PlanConfig
from lrmoe.studies.plan_run import plan
from lrmoe.studies.price import Contender, Price, break_even
from lrmoe.training.trace import TraceWriter

MODEL = ModelShape(name="small", dim=512, expert_dim=256, num_experts=16, top_k=2, moe_layers=3)
MACHINE = Hardware(
    name="machine",
    flops=1e13,
    memory_bytes=2**30,
    memory_bandwidth=1e12,
    intra_bytes_per_s=1e11,
    inter_bytes_per_s=1e10,
    tile_rows=1,
)


def case_of(tokens: int = 4096, *, budget: float = 2**34, skew: float = 2.0, **changed: Any) -> Case:
    routing = routing_for(MODEL, ranks=4, tokens=tokens, skew=skew)
    case = Case(model=MODEL, hardware=MACHINE, ranks=4, tokens=tokens, routing=routing, budget=budget, floor=1)
    return replace(case, **changed)


def test_memory_is_that_of_the_fullest_rank() -> None:
    case = case_of(1024, memory={"optimizer_shards": 2})
    option = Option(policy="lrmoe", slots=1)
    found = Planner(case).memory(option, 0.1, "input")
    made = get("lrmoe", slots=1).plan(case.routing.lam[0], drop=0.1)
    ranks = [
        memory(
            MODEL,
            ranks=4,
            tokens=int(case.routing.lam[0][rank].sum()) // 2,
            rows=int(made.rows_EG[:, rank].sum()),
            kept=int(made.quota_EG[:, rank].sum()),
            save="input",
            slots=1,
            optimizer_shards=2,
        )
        for rank in range(4)
    ]
    assert found.total == max(one.total for one in ranks)
    seconds, even = Planner(case).seconds(option, 0.1, "input")
    time = layer_time(made, MODEL, MACHINE, save="input")
    assert seconds == pytest.approx(3 * time.seconds)
    assert even == pytest.approx(3 * time.balanced)
    again, _ = Planner(replace(case, memory={"recompute": True})).seconds(option, 0.1, "input")
    assert again == pytest.approx(3 * (time.seconds + time.of("forward")))


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 16384])
def test_replicas_are_recommended_where_balance_says_that_they_pay(tokens: int) -> None:
    case = case_of(tokens)
    records = study(case)
    best, sentence = recommend(records, case)
    assert best is not None
    assert best["drop"] == 0.0
    for record in records:
        if not record["slots"]:
            continue
        options = {"floor": 1} if record["policy"] == "ultraep" else {}
        contender = Contender(label="x", policy=get(record["policy"], slots=record["slots"], **options))
        price = Price(model=MODEL, hardware=MACHINE, save=record["save"])
        told = break_even(contender, case.routing.lam, prices=[price], at=tokens)[0]
        assert record["crossover"] == told["tokens"]
        assert record["pays"] == told["here"]["pays"]
        assert record["pays"] == (told["tokens"] is not None and tokens >= told["tokens"])
    if best["slots"]:
        assert best["pays"]
        assert best["over_fixed"] <= FASTER
        assert sentence.startswith(f"Use {best['label']}")
    else:
        assert sentence.startswith("Leave it off: fixed ownership")
        assert not any(r["pays"] and r["seconds"] <= FASTER * best["seconds"] for r in records if r["slots"])


def test_small_batches_and_even_loads_leave_it_off() -> None:
    small, _ = recommend(study(case_of(64)), case_of(64))
    assert small is not None
    assert small["policy"] == "fixed"
    even = case_of(4096, skew=1.0)
    best, sentence = recommend(study(even), even)
    assert best is not None
    assert best["policy"] == "fixed"
    assert "Leave it off" in sentence
    large, _ = recommend(study(case_of(16384)), case_of(16384))
    assert large is not None
    assert large["slots"] > 0, "skewed loads and many tokens: replicas pay"


def test_the_least_drop_that_fits_and_no_less() -> None:
    case = case_of(4096)
    records = study(case)
    least = min(one["exact_bytes"] for one in records)
    lowest = min(one["at_most_drop"]["bytes"] for one in records)
    assert lowest < least
    tight = replace(case, budget=(least + lowest) / 2)
    found = study(tight)
    assert not any(one["fits_exactly"] for one in found)
    best, sentence = recommend(found, tight)
    assert best is not None
    assert 0 < best["drop"] <= 0.2
    assert best["bytes"] <= tight.budget
    assert sentence.startswith(f"Drop {best['drop']:.0%} of the backward's pairs with {best['label']}")
    assert best["drop"] == min(one["drop"] for one in found if one["drop"] is not None)
    before = Planner(tight).memory(
        Option(policy=best["policy"], slots=best["slots"]), round(best["drop"] - 0.01, 10), best["save"]
    )
    assert before.total > tight.budget
    nothing, said = recommend(study(replace(tight, budget=lowest - 1)), replace(tight, budget=lowest - 1))
    assert nothing is None
    assert said.startswith("Nothing fits in")


def test_no_plan_drops_more_than_is_acceptable() -> None:
    """A largest drop between two steps is the last one that is tried, and not the step above it."""
    case = replace(case_of(4096), max_drop=0.126)
    tight = replace(case, budget=min(one["at_most_drop"]["bytes"] for one in study(case)))
    best, _ = recommend(study(tight), tight)
    assert best is not None
    assert best["drop"] == 0.126


def test_replicas_for_memory_are_said_to_be_for_memory() -> None:
    case = case_of(4096, skew=3.0)
    # The weights of replicas go by exchanges of their own, each of which takes long to begin.
    slow = replace(case, hardware=replace(MACHINE, latency_s=1.0))
    records = study(slow)
    assert not any(one["pays"] for one in records if one["slots"])
    at_home = min(one["exact_bytes"] for one in records if not one["slots"])
    fewest = min(one["exact_bytes"] for one in records if one["slots"])
    assert fewest < at_home
    tight = replace(slow, budget=at_home - 1)
    best, sentence = recommend(study(tight), tight)
    assert best is not None
    assert best["slots"] > 0
    assert "for memory and not for time" in sentence


def trace_of(folder: Path, experts: int = 16) -> str:
    writer = TraceWriter(folder / "trace", {"top_k": 2, "dim": 64, "expert_dim": 32, "layers": ["a", "b"]})
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        for layer in range(2):
            writer.add(layer, step, 0, torch.randint(0, 40, (2, experts), generator=generator))
    writer.flush()
    return str(folder)


def test_a_traces_layers_stand_for_the_models_in_turn(tmp_path: Path) -> None:
    routing = routing_for(MODEL, ranks=4, tokens=512, trace=trace_of(tmp_path))
    assert routing.shape == (4, 4, 16)
    assert all(abs(int(lam_GE.sum()) - 4 * 512 * 2) <= 4 for lam_GE in routing.lam)
    case = replace(case_of(512), routing=routing)
    made = [get("fixed").plan(lam_GE) for lam_GE in routing.lam]
    rows = [[int(plan.rows_EG[:, rank].sum()) for plan in made] for rank in range(4)]
    expected = max(
        memory(
            MODEL,
            ranks=4,
            tokens=int(routing.lam[first][rank].sum()) // 2,
            rows=[rows[rank][first], rows[rank][first + 1], rows[rank][first]],
        ).total
        for first in (0, 2)
        for rank in range(4)
    )
    assert Planner(case).memory(Option(policy="fixed", slots=0), 0.0, "preactivation").total == expected


def test_the_command_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 300,
        "num_attention_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    asked = ["plan", "--model", str(tmp_path), "--ep", "4", "--seq", "256", "--trace", trace_of(tmp_path / "run")]
    assert main([*asked, "--recompute", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert f"recommendation: {summary['recommendation']}" in said
    assert json.loads((out / "config.json").read_text())["recompute"] is True
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]
    assert main([*asked, "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ep", "200"], "--ep 200 must be between 1 and num_experts=128"),
        (["--max-drop", "1"], "--max-drop 1.0 must be in [0, 1)"),
        (["--model", "none"], "--model none is neither a preset"),
        (["--skew", "2", "--loads", "x"], "--loads x and --skew 2.0 exclude each other"),
        (["--steps", "3"], "--steps 3 is of a trace"),
        (["--loads", "LOADS"], "holds loads of 2 experts, but qwen3-30b-a3b has 128 a layer"),
        (["--experts-only", "--dense-shards", "2"], "--dense-shards 2 has no effect with --experts-only"),
        (["--budget-gib", "0"], "--budget-gib 0.0 must be a finite number above 0"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loads.json").write_text("[[3, 1], [2, 2]]")
    ranks = ["--ep", "2"] if "LOADS" in options else []
    given = [str(tmp_path / "loads.json") if option == "LOADS" else option for option in options]
    assert main(["plan", *given, *ranks, "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_the_default_plan_of_a_large_model() -> None:
    summary = plan(PlanConfig(recompute=True))
    assert summary["memory"]["total"] <= 80 * 2**30
    assert summary["recommended"]["policy"] == "lrmoe"
    assert summary["recommended"]["drop"] == 0.0


def test_one_rank_is_a_cluster_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ep", "1", "--seq", "512", "--experts-only", "--budget-gib", "2000"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "recommendation: Leave it off" in said
    assert "on one rank there is nothing to balance" in said
