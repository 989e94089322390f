"""Memory of one MoE layer's experts: bytes saved for the backward, and the backward's temporaries.

Counted, not sampled: saved tensors by autograd's hooks (each storage once, parameters left out), temporaries by the
allocator's own events. The figures are the same on every run.

    python benchmarks/memory.py --out docs/results/layer_memory.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from layer import Inputs, Shape, lrmoe_experts, make_inputs, transformers_experts
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lrmoe import strict_json
from lrmoe.training.memory import measure_saved_bytes


def saved_bytes(forward: Callable[[], Tensor], inputs: Inputs) -> int:
    """Bytes autograd keeps between forward and backward, in distinct storages. The layer's input is counted (somebody
    must keep it); its weights are not."""
    with measure_saved_bytes(nn.ParameterList([inputs.gate_up_proj, inputs.down_proj]), []) as saved:
        # The graph must live until all is counted.
        out_TD = forward()
    del out_TD
    return saved.model


def peak_temporaries(forward: Callable[[], Tensor], inputs: Inputs) -> int:
    """Highest number of bytes that the backward holds at once beyond what stood before it and beyond the weights'
    gradients, which any backward leaves behind."""
    for leaf in inputs.leaves:
        leaf.grad = None
    out_TD = forward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        out_TD.backward(inputs.grad_TD, retain_graph=True)
    held = peak = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    gradients = sum(weight.numel() * weight.element_size() for weight in (inputs.gate_up_proj, inputs.down_proj))
    return peak - gradients


def measure(shape: Shape, dtype: torch.dtype) -> list[dict[str, object]]:
    inputs = make_inputs(shape, dtype, seed=0)
    contenders = {"transformers grouped_mm": transformers_experts(shape, inputs)}
    for save in ("preactivation", "input"):
        for drop in (0.0, 0.2, 0.5, 0.8):
            contenders[f"lrmoe save={save} drop={drop:.0%}"] = lrmoe_experts(inputs, drop=drop, save=save)
    return [
        {
            "name": name,
            "saved_bytes": saved_bytes(forward, inputs),
            "temporary_bytes": peak_temporaries(forward, inputs),
        }
        for name, forward in contenders.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("T", 2048), ("D", 1024), ("F", 512), ("E", 64), ("K", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(T=args.T, D=args.D, F=args.F, E=args.E, K=args.K)
    rows = measure(shape, getattr(torch, args.dtype))
    host = rows[0]
    print(f"{'':36}{'saved MiB':>10}{'/ Transformers':>15}{'temporaries MiB':>16}{'/ Transformers':>15}")
    for row in rows:
        saved, temporary = int(row["saved_bytes"]), int(row["temporary_bytes"])  # type: ignore[call-overload]
        print(
            f"{row['name']:36}{saved / 2**20:10.1f}{saved / int(host['saved_bytes']):15.3f}"  # type: ignore[call-overload]
            f"{temporary / 2**20:16.1f}{temporary / int(host['temporary_bytes']):15.3f}"  # type: ignore[call-overload]
        )
    if args.out:
        about = {"command": shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]]), "dtype": args.dtype}
        result = about | {"shape": vars(shape), "torch": torch.__version__, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(strict_json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
