"""What other scores and remainders would do to the error of the experts' weight gradients, on one model.

Trains the preset qwen3-moe-nano without drop (batch 8, 128 tokens, AdamW at 2e-3) and stops at some steps. There, on
batches it has not seen, each layer's rows are held as the exact backward has them, each way of choosing rows makes a
gradient of them, and that is compared with the exact one: in a batch, and in the mean over the batches. The gradient
that arrives at a layer is always the exact one, so that errors of other layers do not count.

    python benchmarks/second_stage.py --out docs/results/studies/second_stage.json

N rows sorted by expert, E experts, D model width, F expert width.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lrmoe import strict_json
from lrmoe.ops import activations
from lrmoe.ops.grouped_mm import grouped_mm, grouped_wgrad
from lrmoe.ops.permute import sort_by_expert
from lrmoe.recalibration.draws import Source
from lrmoe.recalibration.quota import quotas
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import Kept, select
from lrmoe.studies.results import Column, StudyResult, Table
from lrmoe.training.documents import read_documents
from lrmoe.training.presets import PRESETS
from lrmoe.training.text import TrainingOrder, tokenize
from lrmoe.training.tokenizer import byte_tokenizer

MODEL, BATCH, SEQ, LR = "qwen3-moe-nano", 8, 128, 2e-3
MATRICES = ("down", "gate_up")


@dataclass(frozen=True, slots=True)
class Rows:
    """A layer's pairs by expert: ``x_ND`` inputs, ``g_ND`` alpha g, ``phi_NF``, ``slope_N2F`` the derivative of phi by
    the up projection's output (gate, then up)."""

    x_ND: Tensor
    g_ND: Tensor
    phi_NF: Tensor
    slope_N2F: Tensor
    gate_up: Tensor
    down: Tensor
    segments: Segments
    source: Source

    @property
    def load_E(self) -> Tensor:
        return self.segments.count_S[:-1]

    def mean(self, rows: Tensor, of_N: Tensor) -> Tensor:
        """Each expert's mean of the rows where ``of_N``, (E, ...); 0 where there are none."""
        sums = rows.new_zeros(len(self.load_E), rows.shape[1]).index_add_(
            0, self.segments.of_N, rows * of_N.unsqueeze(1)
        )
        return sums / self.segments.total(of_N).clamp(min=1).unsqueeze(1)


Gradients = tuple[Tensor, Tensor]


def gradients(rows: Rows, kept: Kept | None, remainder: tuple[Tensor, Tensor] | None = None) -> Gradients:
    """(down, gate_up) of the kept rows (all if None) and of one more row an expert: ``remainder`` has its alpha g,
    (E, D), and which rows its other operands are the means of, (N,)."""
    count_E = rows.load_E if kept is None else kept.count_E
    index_M = torch.arange(len(rows.x_ND)) if kept is None else kept.index_M
    weight_M = torch.ones(len(index_M)) if kept is None else kept.weight_M.float()
    offs_E = count_E.cumsum(0).to(torch.int32)
    g_MD = rows.g_ND[index_M] * weight_M.unsqueeze(1)
    dh_M2F = grouped_mm(g_MD, rows.down, offs_E).repeat(1, 2) * rows.slope_N2F[index_M]
    down = grouped_wgrad(g_MD, rows.phi_NF[index_M], offs_E)
    gate_up = grouped_wgrad(dh_M2F, rows.x_ND[index_M], offs_E)
    if remainder is not None:
        g_ED, of_N = remainder
        down = down + g_ED.unsqueeze(2) * rows.mean(rows.phi_NF, of_N).unsqueeze(1)
        dphi_EF = torch.bmm(g_ED.unsqueeze(1), rows.down).squeeze(1)
        dh_E2F = dphi_EF.repeat(1, 2) * rows.mean(rows.slope_N2F, of_N)
        gate_up = gate_up + dh_E2F.unsqueeze(2) * rows.mean(rows.x_ND, of_N).unsqueeze(1)
    return down, gate_up


def up_sizes(rows: Rows) -> Tensor:
    """(N,): ||x||^2 sum_i w_i slope_i^2, w_i = ||W_down[:, i]||^2 / D: what the gate and up projections' gradient of a
    row is expected to measure, squared, by alpha^2 ||g||^2, were g to point anywhere."""
    w_EF = rows.down.square().mean(1)
    w_N2F = w_EF.index_select(0, rows.segments.of_N).repeat(1, 2)
    return rows.x_ND.square().sum(1) * (w_N2F * rows.slope_N2F.square()).sum(1)


def evened(first_N: Tensor, second_N: Tensor, segments: Segments) -> Tensor:
    """The sum of both, each over its expert's mean."""
    count_E = segments.count_S[:-1].clamp(min=1)
    return sum(  # type: ignore[return-value]
        part_N / segments.spread(segments.total(part_N) / count_E).clamp(min=1e-30) for part_N in (first_N, second_N)
    )


def scores(rows: Rows) -> dict[str, Tensor]:
    """r of each row by each score, (N,) fp64."""
    g_N = rows.g_ND.double().square().sum(1)
    phi_N, up_N = rows.phi_NF.double().square().sum(1), up_sizes(rows).double()
    offs_E = rows.load_E.cumsum(0).to(torch.int32)
    dh_N2F = grouped_mm(rows.g_ND, rows.down, offs_E).repeat(1, 2) * rows.slope_N2F
    true_N = dh_N2F.double().square().sum(1) * rows.x_ND.double().square().sum(1)
    centred_NF = rows.phi_NF - rows.mean(rows.phi_NF, torch.ones(len(g_N)))[rows.segments.of_N]
    squares = {
        "lrm": g_N * phi_N,
        "glu": g_N * (phi_N + up_N),
        "glu, evened": g_N * evened(phi_N, up_N, rows.segments),
        "both norms": evened(g_N * phi_N, true_N, rows.segments),
        "centred": g_N * centred_NF.double().square().sum(1),
    }
    return {name: square_N.sqrt() for name, square_N in squares.items()}


def chosen(rows: Rows, score_N: Tensor, drop: float, selector: Any, kind: Any = "expert") -> Kept:
    quota_E = quotas(kind, rows.load_E, drop)
    return select(score_N, rows.segments, quota_E, selector=selector, source=rows.source, pooled=kind == "pooled")


def with_remainder(rows: Rows, kept: Kept) -> Gradients:
    """What was dropped as one row an expert: the sum of its alpha g, and the means of its other operands."""
    dropped_N = torch.ones(len(rows.x_ND)).index_fill(0, kept.index_M, 0.0)
    g_ED = torch.zeros_like(rows.down[:, :, 0]).index_add_(0, rows.segments.of_N, rows.g_ND * dropped_N.unsqueeze(1))
    return gradients(rows, kept, (g_ED, dropped_N))


def with_control_variate(rows: Rows, kept: Kept) -> Gradients:
    """What the weighted kept rows miss of the sum of alpha g, by the means of the other operands over all rows."""
    missing_N = torch.ones(len(rows.x_ND)).index_add(0, kept.index_M, -kept.weight_M.float())
    g_ED = torch.zeros_like(rows.down[:, :, 0]).index_add_(0, rows.segments.of_N, rows.g_ND * missing_N.unsqueeze(1))
    return gradients(rows, kept, (g_ED, torch.ones(len(rows.x_ND))))


def ways(rows: Rows, drop: float) -> Iterator[tuple[str, Callable[[], Gradients]]]:
    """Every way to make a layer's gradients at this drop."""
    r = scores(rows)

    def plain(*how: Any) -> Gradients:
        return gradients(rows, chosen(rows, *how))

    for name in ("lrm", "glu", "glu, evened", "both norms"):
        yield f"pps, {name}", partial(plain, r[name], drop, "pps")
    yield "pps, lrm, pooled quota", partial(plain, r["lrm"], drop, "pps", "pooled")
    yield "pps, lrm, control variate", partial(with_control_variate, rows, chosen(rows, r["lrm"], drop, "pps"))
    for kind, label in (("expert", "control variate"), ("pooled", "control variate, pooled quota")):
        kept = chosen(rows, r["centred"], drop, "pps", kind)
        yield f"pps, centred, {label}", partial(with_control_variate, rows, kept)
    for name in ("lrm", "glu", "glu, evened", "both norms"):
        yield f"topq, {name}", partial(plain, r[name], drop, "topq")
    yield "topq, lrm, pooled quota", partial(plain, r["lrm"], drop, "topq", "pooled")
    yield "topq, lrm, remainder", partial(with_remainder, rows, chosen(rows, r["lrm"], drop, "topq"))
    kept = chosen(rows, r["centred"], drop, "topq")
    yield "topq, centred, control variate", partial(with_control_variate, rows, kept)
    yield "random", partial(plain, r["lrm"], drop, "random")


def capture(model: Any, batch: Tensor, number: int) -> list[Rows]:
    """Every MoE layer's rows in one forward and backward."""
    found: list[tuple[Any, Tensor, Tensor, Tensor, list[Tensor]]] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out_TD: Tensor) -> None:
        x_TD, ids_TK, alpha_TK = (value.detach() for value in (*args, *kwargs.values()))
        gradient: list[Tensor] = []
        out_TD.register_hook(gradient.append)  # type: ignore[no-untyped-call]
        found.append((module, x_TD, ids_TK, alpha_TK, gradient))

    modules = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return [_sorted_rows(*one, number, layer) for layer, one in enumerate(found)]


def _sorted_rows(
    module: Any, x_TD: Tensor, ids_TK: Tensor, alpha_TK: Tensor, gradient: list[Tensor], number: int, layer: int
) -> Rows:
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    num_experts = len(down)
    pair_N, load_E = sort_by_expert(ids_TK.reshape(-1), num_experts)
    token_N = pair_N // ids_TK.shape[1]
    x_ND = x_TD.index_select(0, token_N)
    g_ND = gradient[0].index_select(0, token_N) * alpha_TK.reshape(-1)[pair_N].unsqueeze(1)
    h_N2F = grouped_mm(x_ND, gate_up.transpose(1, 2), load_E.cumsum(0).to(torch.int32))
    act = activations.get("silu")
    gate, up = act.split(h_N2F)
    phi_NF, *slopes = act.backward(gate, up, torch.ones_like(gate))
    source = Source.of_all((0, number, layer, 0), num_experts, x_TD.device)
    segments = Segments.from_loads(load_E, len(pair_N))
    return Rows(x_ND, g_ND, phi_NF, torch.cat(slopes, 1), gate_up, down, segments, source)


def square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def measure(model: Any, batches: list[Tensor], rates: list[float], first: int) -> list[dict[str, Any]]:
    """Relative squared errors of every way, matrix and rate: in a batch, and of the batches' mean; mean over layers."""
    sums: dict[Any, Tensor] = {}
    squares: dict[Any, float] = {}

    def add(key: Any, tensor: Tensor) -> None:
        sums[key] = sums[key] + tensor if key in sums else tensor.clone()
        squares[key] = squares.get(key, 0.0) + square(tensor)

    layers: set[int] = set()
    names: dict[tuple[float, str], None] = {}
    for number, batch in enumerate(batches):
        for layer, rows in enumerate(capture(model, batch, first + number)):
            layers.add(layer)
            exact = gradients(rows, None)
            for matrix, tensor in zip(MATRICES, exact, strict=True):
                add((layer, matrix), tensor)
            for rate in rates:
                for name, make in ways(rows, rate):
                    names[rate, name] = None
                    for matrix, tensor, true in zip(MATRICES, make(), exact, strict=True):
                        add((layer, matrix, rate, name), tensor - true)

    def share(matrix: str, rate: float, name: str, part: Callable[[Any], float]) -> float:
        return sum(part((i, matrix, rate, name)) / part((i, matrix)) for i in layers) / len(layers)

    return [
        {
            "rate": rate,
            "way": name,
            **{f"{matrix}_one": share(matrix, rate, name, lambda key: squares[key]) for matrix in MATRICES},
            **{f"{matrix}_mean": share(matrix, rate, name, lambda key: square(sums[key])) for matrix in MATRICES},
        }
        for rate, name in names
    ]


def run(seed: int, steps: list[int], batches: int, rates: list[float]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(seed)
    config = PRESETS[MODEL]()
    config.experts_implementation = "grouped_mm"
    model = transformers.AutoModelForCausalLM.from_config(config)
    text = tokenize(read_documents(None), byte_tokenizer(), seq=SEQ)
    length = (max(steps) + batches) * BATCH
    order = TrainingOrder(text.train_N, seq=SEQ, length=length, seed=seed)

    def batch(number: int) -> Tensor:
        return torch.stack([order[number * BATCH + i]["input_ids"] for i in range(BATCH)])

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in range(max(steps) + 1):
        if step in steps:
            fresh = [batch(max(steps) + i) for i in range(batches)]
            for row in measure(model, fresh, rates, max(steps)):
                yield {"seed": seed, "step": step, **row}
        if step == max(steps):
            return
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20)
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"seed {seed}, step {step}: loss {loss.item():.3f}", flush=True)


# What is held against what.
CANDIDATES = {
    "pps, glu": "pps, lrm",
    "pps, glu, evened": "pps, lrm",
    "pps, lrm, pooled quota": "pps, lrm",
    "pps, lrm, control variate": "pps, lrm",
    "pps, centred, control variate": "pps, lrm",
    "pps, centred, control variate, pooled quota": "pps, centred, control variate",
    "topq, glu": "topq, lrm",
    "topq, glu, evened": "topq, lrm",
    "topq, lrm, pooled quota": "topq, lrm",
    "topq, lrm, remainder": "topq, lrm",
    "topq, centred, control variate": "topq, lrm",
}


def conclude(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(conclusions, advice): each candidate's error against what it would replace, at every step, rate and seed."""
    cells = {(row["seed"], row["step"], row["rate"], row["way"]): row for row in rows}
    places = list(dict.fromkeys(cell[:3] for cell in cells))

    def changes(way: str, base: str, kind: str) -> list[float]:
        def both(place: tuple[Any, ...], name: str) -> float:
            return float(sum(cells[(*place, name)][f"{matrix}_{kind}"] for matrix in MATRICES))

        return [both(place, way) / both(place, base) - 1 for place in places]

    said, better, not_better = [], [], []
    for way, base in CANDIDATES.items():
        one, mean = changes(way, base, "one"), changes(way, base, "mean")
        said.append(
            f"“{way}” against “{base}”, down, gate and up together: {min(one):+.0%} to {max(one):+.0%} in one batch, "
            f"{min(mean):+.0%} to {max(mean):+.0%} in the mean of the batches."
        )
        (better if max(one) < 0 and max(mean) < 0 else not_better).append(f"“{way}”")
    advice = []
    if better:
        advice.append(f"Worth training runs, having less error at every step, rate and seed: {', '.join(better)}.")
    if not_better:
        advice.append(f"Leave alone, having more error somewhere: {', '.join(not_better)}.")
    return said, advice


def result(rows: list[dict[str, Any]], arguments: argparse.Namespace, seconds: float) -> StudyResult:
    columns = [
        Column(key="way", label="Rows chosen by", form="text", meaning="selector, score and what is added"),
        Column(key="down_one", label="Down, one batch", form="4"),
        Column(key="gate_up_one", label="Gate and up, one batch", form="4"),
        Column(key="down_mean", label=f"Down, mean of {arguments.batches}", form="4"),
        Column(key="gate_up_mean", label=f"Gate and up, mean of {arguments.batches}", form="4"),
    ]
    tables = []
    for rate in arguments.rates:
        for step in arguments.at:
            mine = [row for row in rows if row["rate"] == rate and row["step"] == step]
            merged = []
            for way in dict.fromkeys(row["way"] for row in mine):
                of_seeds = [row for row in mine if row["way"] == way]
                keys = [column.key for column in columns[1:]]
                merged.append(
                    {"way": way, **{key: sum(row[key] for row in of_seeds) / len(of_seeds) for key in keys}}
                    | {"seeds": of_seeds}
                )
            tables.append(
                Table(
                    name=f"drop-{round(100 * rate)}-step-{step}",
                    title=f"Squared error of the experts' gradients, {rate:.0%} dropped, after {step} steps",
                    settings={"model": MODEL, "seeds": len(arguments.seeds), "tokens a batch": BATCH * SEQ},
                    columns=columns,
                    rows=merged,
                    note="Relative to the squared norm of the exact gradient; mean over layers and seeds. What is the "
                    "same in every batch stays in the mean; what the draw brings falls with the number of batches.",
                )
            )
    conclusions, advice = conclude(rows)
    return StudyResult(
        study="second_stage",
        title="Other scores, and what stands in for the dropped rows",
        question="Does a score that looks at the gate and up projections, or a row that stands for the dropped ones, "
        "lower the error of the experts' gradients?",
        tables=tables,
        figures=[],
        conclusions=conclusions,
        advice=advice,
        provenance={
            "command": f"python benchmarks/second_stage.py --seeds {' '.join(map(str, arguments.seeds))}",
            "seeds": arguments.seeds,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": f"{platform.machine()}, one thread",
            "seconds": round(seconds),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", type=int, nargs="+", default=[50, 200], help="steps after which to measure (50 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the weights and the data order (0 1)")
    parser.add_argument("--batches", type=int, default=16, help="fresh batches at each measurement (16)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.5], help="shares to drop (0.2 0.5)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    rows = []
    for seed in arguments.seeds:
        for row in run(seed, arguments.at, arguments.batches, arguments.rates):
            rows.append(row)
            numbers = "  ".join(f"{key} {row[key]:.5f}" for key in row if key.endswith(("one", "mean")))
            print(f"seed {seed} step {row['step']} drop {row['rate']:.1f} {row['way']:38s} {numbers}", flush=True)
    found = result(rows, arguments, time.process_time() - start)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(strict_json.dumps(found.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
