"""The model on paper against this machine: MoE time and saved bytes of the tiny presets, and the order of policies.

First a few products, activations and gathers are timed, which gives the model's constants. Then six settings of two
small models run one forward and backward each, and their MoE time (thread CPU time) and the bytes that their experts
save are compared with what the model says. Then a recorded trace is played, as it is, to expert-parallel engines over
four processes under several policies; the straggler clock's critical path of each (lrmoe.parallel.phase_timer) is
compared with the predicted one.

    python benchmarks/cluster_model.py --out docs/results/cluster_model.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lrmoe
from lrmoe import strict_json
from lrmoe.balance import get
from lrmoe.cluster import (
    FP32,
    Hardware,
    ModelShape,
    calibrate,
    from_config,
    layer_time,
    measure_planning,
    token_buffers,
)
from lrmoe.cluster.time import activation_bytes
from lrmoe.ops import activations
from lrmoe.ops.glu import glu_backward, glu_forward
from lrmoe.ops.grouped_mm import grouped_mm
from lrmoe.parallel import ExpertParallel
from lrmoe.parallel.phase_timer import PhaseTimer
from lrmoe.training.memory import measure_saved_bytes
from lrmoe.training.models import load_model
from lrmoe.training.presets import PRESETS
from lrmoe.training.trace import read_trace

SETTINGS: tuple[tuple[float, str], ...] = ((0.0, "preactivation"), (0.3, "preactivation"), (0.5, "input"))
POLICIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "fixed": ("fixed", {}, 0.0),
    "fixed, 30%": ("fixed", {}, 0.3),
    "fixed, 60%": ("fixed", {}, 0.6),
    "lrmoe": ("lrmoe", {"slots": 1}, 0.0),
    "lrmoe, 30%": ("lrmoe", {"slots": 1}, 0.3),
    "lrmoe, 60%": ("lrmoe", {"slots": 1}, 0.6),
}
BANDWIDTH = 2e9


def seconds_of(run: Callable[[], object], repeats: int = 9) -> float:
    """Median thread CPU time, after a first run."""
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def this_machine() -> Hardware:
    """One core's constants; the links' are those that the straggler clock prices transfers at."""
    D, F, E = 128, 128, 32
    act = activations.get("silu")

    def operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        offs_E = torch.full((E,), rows // E).cumsum(0).to(torch.int32)
        return torch.randn(rows, D), torch.randn(E, 2 * F, D), offs_E

    gemms = []
    for rows in (2048, 4096, 8192, 16384):
        x, w, offs = operands(rows)
        gemms.append(([rows // E] * E, D, 2 * F, seconds_of(lambda: grouped_mm(x, w.transpose(1, 2), offs))))  # noqa: B023
    rows = 8192
    h, t, scale = torch.randn(rows, 2 * F), torch.randn(rows, F), torch.rand(rows)
    order = torch.randperm(rows)
    forward = seconds_of(lambda: glu_forward(h, act, live=rows, norms=True))
    backward = seconds_of(lambda: glu_backward(h, order, t, scale, scale, act))
    touched = rows * F * sum(activation_bytes(which, 4, "blocked") for which in ("forward", "backward"))
    x = torch.randn(rows, D)
    gather = seconds_of(lambda: x.index_select(0, order))
    # All that the backward does for a pair beside its products: of experts that have next to none.
    plain = Hardware(
        name="one core",
        flops=1e11,
        memory_bytes=8e9,
        memory_bandwidth=1e11,
        intra_bytes_per_s=BANDWIDTH,
        inter_bytes_per_s=BANDWIDTH,
        source="this machine",
        tile_rows=1,
        link_efficiency=1.0,
        latency_s=0.0,
    )
    rate, group_s = (getattr(calibrate(plain, gemms=gemms), name) for name in ("flops", "group_s"))
    selections, sortings = [], []
    for tokens in (512, 2048):
        inputs = [torch.randn(tokens, 4), torch.randn(E, 8, 4), torch.randn(E, 4, 4), torch.rand(tokens, 4)]
        narrow, gate_up, down, alpha = (tensor.requires_grad_() for tensor in inputs)
        ids = torch.rand(tokens, E).topk(4, dim=1).indices

        def experts() -> Tensor:
            return lrmoe.routed_experts(narrow, ids, alpha, gate_up, down, config=lrmoe.LRMoEConfig(drop=0.3))  # noqa: B023

        out = experts()
        grad = torch.ones_like(out)
        # Less what their products cost, two in the forward and four in the backward.
        products = [count * E * group_s + 6 * count * tokens * 4 * 4 * 4 / rate for count in (2, 4)]
        sortings.append((4 * tokens, seconds_of(experts) - products[0]))
        backward_s = seconds_of(lambda: out.backward(grad, retain_graph=True))  # noqa: B023
        selections.append((4 * tokens, backward_s - products[1]))
    return calibrate(
        plain,
        gemms=gemms,
        glu_bytes_per_s=touched / (forward + backward),
        index_bytes_per_s=rows * 2 * D * 4 / gather,
        select=selections,
        sort=sortings,
    )


def measure_settings(hardware: Hardware, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for preset in PRESETS:
        for drop, save in SETTINGS:
            rows.append(measure_setting(preset, drop, save, hardware, repeats))
            print(f"{preset}, drop {drop:.0%}, save={save}", file=sys.stderr, flush=True)
    return rows


def measure_setting(preset: str, drop: float, save: Any, hardware: Hardware, repeats: int) -> dict[str, Any]:
    """One preset on random text: measured and predicted."""
    model, _ = load_model(preset, seed=0)
    shape = from_config(model.config.to_dict(), name=preset)
    ids = torch.randint(2, 250, (8, 256), generator=torch.Generator().manual_seed(0))
    tokens = ids.numel()
    recalibrator = lrmoe.attach(model, lrmoe.LRMoEConfig(drop=drop, save=save))
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    model.train()
    with measure_saved_bytes(model, experts) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    with lrmoe.recording() as calls:
        loss.backward()
    recalibrator.metrics()
    times = []
    for turn in range(repeats + 1):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        metrics = recalibrator.metrics()
        if turn:
            times.append((metrics["forward_seconds"], metrics["backward_seconds"]))
    # The last steps' sum over layers of one forward and backward.
    forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
    predicted = []
    for call in calls:
        plan = get("fixed").plan(call.load_E.unsqueeze(0), drop=drop)
        predicted.append(layer_time(plan, shape, hardware, precision=FP32, save=save, elementwise="blocked"))
    of_forward, of_backward = (sum(layer.of(which) for layer in predicted) for which in ("forward", "backward"))
    buffers = token_buffers(shape, tokens=tokens, save=save, activation_bytes=4, parallel=False)
    bytes_predicted = shape.moe_layers * buffers.saved_bytes
    recalibrator.detach()
    return {
        "preset": preset,
        "drop": drop,
        "save": save,
        "tokens": tokens,
        "forward_s": forward,
        "forward_predicted_s": of_forward,
        "backward_s": backward,
        "backward_predicted_s": of_backward,
        "time_error": (of_forward + of_backward) / (forward + backward) - 1,
        "saved_bytes": saved.moe,
        "saved_predicted": bytes_predicted,
        "saved_error": bytes_predicted / saved.moe - 1,
    }


def ids_of(load_E: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """(T, K) routes, distinct for each token, with exactly these loads: pairs by expert, dealt out down the columns;
    the last ones may be without an expert."""
    ids = torch.repeat_interleave(torch.arange(load_E.numel()), load_E)
    tokens = -(-ids.numel() // top_k)
    ids = torch.cat([ids, ids.new_full((tokens * top_k - ids.numel(),), -1)])
    if int(load_E.max()) > tokens:
        raise ValueError("an expert has more pairs than there are tokens")
    ids_TK = ids.view(top_k, tokens).t().contiguous()
    return ids_TK[torch.randperm(tokens, generator=generator)]


def run_rank(rank: int, port: int, options: dict[str, Any], answers: Any) -> None:
    torch.set_num_threads(1)
    size = options["ranks"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    trace = read_trace(Path(options["trace"]), ranks=size)
    E, K, D, F = trace.lam_NGE.shape[2], trace.about["top_k"], options["dim"], options["expert_dim"]
    records = range(0, len(trace), max(1, len(trace) // options["records"]))
    generator = torch.Generator().manual_seed(rank)
    inputs = []
    for record in records:
        ids_TK = ids_of(torch.from_numpy(trace.lam_NGE[record, rank]).long(), K, generator)
        x_TD = torch.randn(len(ids_TK), D, generator=generator).requires_grad_()
        alpha_TK = torch.rand(len(ids_TK), K, generator=generator).softmax(-1).requires_grad_()
        inputs.append((x_TD, ids_TK, alpha_TK))
    engines = {
        name: ExpertParallel(
            dist.group.WORLD,
            num_experts=E,
            policy=get(policy, **chosen),
            config=lrmoe.LRMoEConfig(drop=drop),
        )
        for name, (policy, chosen, drop) in POLICIES.items()
    }
    own = len(engines["fixed"].local_experts)
    weights = (
        nn.Parameter(torch.randn(own, 2 * F, D, generator=generator) * D**-0.5),
        nn.Parameter(torch.randn(own, D, F, generator=generator) * F**-0.5),
    )
    turns: dict[str, list[float]] = {name: [] for name in POLICIES}
    # All policies by turns: what else the machine does meets them alike. The first round warms up.
    for turn in range(options["rounds"] + 1):
        for name, engine in engines.items():
            engine.clock = PhaseTimer(bytes_per_s=options["bandwidth"])
            for number, (x_TD, ids_TK, alpha_TK) in enumerate(inputs):
                out_TD = engine.routed_experts(x_TD, ids_TK, alpha_TK, *weights, step=turn, microbatch=number)
                out_TD.backward(torch.ones_like(out_TD))
            path = engine.clock.collect(dist.group.WORLD)
            if turn:
                turns[name].append(path.critical_s)
        if rank == 0:
            print(f"round {turn}/{options['rounds']}", file=sys.stderr, flush=True)
    rows = [
        {"name": name, "drop": drop, "critical_s": statistics.median(turns[name]), "rounds_s": turns[name]}
        for name, (_, _, drop) in POLICIES.items()
    ]
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure_trace(options: dict[str, Any]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    ranks = range(options["ranks"])
    processes = [context.Process(target=run_rank, args=(rank, port, options, answers)) for rank in ranks]
    for process in processes:
        process.start()
    rows: list[dict[str, Any]] = answers.get(timeout=600)
    for process in processes:
        process.join()
    return rows


def predict_trace(options: dict[str, Any], hardware: Hardware) -> list[dict[str, Any]]:
    """Of each policy on the same records: seconds, and the busiest over mean rank's forward rows."""
    trace = read_trace(Path(options["trace"]), ranks=options["ranks"])
    shape = ModelShape(
        name="trace",
        dim=options["dim"],
        expert_dim=options["expert_dim"],
        num_experts=trace.lam_NGE.shape[2],
        top_k=trace.about["top_k"],
        moe_layers=1,
    )
    records = range(0, len(trace), max(1, len(trace) // options["records"]))
    rows = []
    for name, (policy_name, chosen, drop) in POLICIES.items():
        policy = get(policy_name, **chosen)
        seconds = 0.0
        skew = []
        loads = [torch.from_numpy(trace.lam_NGE[record]).long() for record in records]
        planning = measure_planning(policy, loads, drop=drop)
        for lam_GE in loads:
            plan = policy.plan(lam_GE, drop=drop)
            layer = layer_time(
                plan,
                shape,
                hardware,
                precision=FP32,
                elementwise="blocked",
                resend=False,
                plan_s=planning.plan_s + planning.alloc_s,
            )
            # The clock does not see how pairs are sorted and loads are told.
            seconds += layer.seconds - layer["sort"] - layer["loads of all ranks"]
            rows_G = plan.rows_EG.sum(0).double()
            skew.append(float(rows_G.max() / rows_G.mean()))
        rows.append({"name": name, "predicted_s": seconds, "max_over_mean": statistics.mean(skew)})
    return rows


def ranking(rows: list[dict[str, Any]], key: str) -> list[str]:
    return [row["name"] for row in sorted(rows, key=lambda row: float(row[key]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("repeats", 9),
        ("ranks", 4),
        ("records", 20),
        ("rounds", 5),
        ("dim", 256),
        ("expert-dim", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trace", default="docs/results/router_trace")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hardware = this_machine()
    print(f"{hardware.flops / 1e9:.1f} GFLOP/s, {hardware.group_s * 1e6:.0f} us a group", file=sys.stderr)
    settings = measure_settings(hardware, args.repeats)
    print(f"{'':18}{'drop':>6}{'save':>15}{'MoE ms':>9}{'predicted':>11}{'error':>8}{'saved MiB':>11}{'error':>8}")
    for row in settings:
        measured, predicted = (1e3 * (row[f"forward{p}_s"] + row[f"backward{p}_s"]) for p in ("", "_predicted"))
        print(
            f"{row['preset']:18}{row['drop']:6.0%}{row['save']:>15}{measured:9.1f}{predicted:11.1f}"
            f"{row['time_error']:+8.1%}{row['saved_bytes'] / 2**20:11.2f}{row['saved_error']:+8.2%}"
        )
    options = {"ranks": args.ranks, "records": args.records, "rounds": args.rounds, "trace": args.trace}
    options |= {"bandwidth": BANDWIDTH, "dim": args.dim, "expert_dim": args.expert_dim}
    measured_rows, predicted_rows = measure_trace(options), predict_trace(options, hardware)
    rows = [{**a, **b} for a, b in zip(measured_rows, predicted_rows, strict=True)]
    print(f"\n{'policy':18}{'clock s':>9}{'predicted':>11}{'error':>8}{'rows max/mean':>15}")
    for row in rows:
        error = row["predicted_s"] / row["critical_s"] - 1
        print(
            f"{row['name']:18}{row['critical_s']:9.3f}{row['predicted_s']:11.3f}{error:+8.1%}{row['max_over_mean']:15.2f}"
        )
    agrees = ranking(rows, "critical_s") == ranking(rows, "predicted_s")
    print("the order of the policies is the same" if agrees else "the order of the policies differs")
    if args.out:
        about = {
            "command": shlex.join(["python", "benchmarks/cluster_model.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "threads": "1 a rank",
            "hardware": vars(hardware),
            "settings": settings,
            "trace_options": options,
            "policies": rows,
            "same_order": agrees,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(strict_json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
