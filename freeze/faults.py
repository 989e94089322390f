"""Thirty deliberate faults, and whether the tests catch them: ``python -m freeze.faults [NAME ...]``.

Each is what a wrong move of code might leave: it imports, runs, and computes or shows something else. The text that it
replaces is looked for in the whole of ``src/lrmoe`` and has to be there exactly once, so that moving it to another file
changes nothing here; a fault whose text is gone is stale, and has to follow the code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new``; ``tests`` ought to catch it: paths, and what ``-k`` takes."""

    name: str
    old: str
    new: str
    tests: str


FAULTS = (
    # The operator and its decisions.
    Fault(
        "weight of a kept pair",
        "torch.where(kept_ranks_N, 1.0 / probability_N, 0.0)",
        "torch.where(kept_ranks_N, probability_N, 0.0)",
        "tests/recalibration/test_selection.py tests/recalibration/test_selection_statistics.py",
    ),
    Fault(
        "a quota one too large",
        "return quota_E + _first(by_load_E, target - quota_E.sum()) * room_E",
        "return quota_E + _first(by_load_E, target - quota_E.sum() + 1) * room_E",
        "tests/recalibration/test_quota.py",
    ),
    Fault(
        "importance without the routing weight's share",
        "product_N = alpha_root_N * grad_root_N",
        "product_N = grad_root_N + 0 * alpha_root_N",
        "tests/recalibration/test_importance.py",
    ),
    Fault(
        "draws without the microbatch",
        "for part in (*self.position, stream):",
        "for part in (*self.position[:3], stream):",
        "tests/recalibration/test_draws.py tests/experts/test_experts_gradients.py",
    ),
    Fault(
        "norms of phi in another order",
        "phi_root_N=saved.phi_root_N.index_select(0, ordered.row_N),",
        "phi_root_N=saved.phi_root_N.flip(0).index_select(0, ordered.row_N),",
        "tests/experts/test_experts_gradients.py",
    ),
    Fault(
        "a mask that stays after its call",
        "mask_T, doubt = at.tokens.real_rows(x.shape[:-1], batch_major=batch_major)",
        "mask_T, doubt = at.tokens.real_rows(x.shape[:-1], batch_major=batch_major)\n"
        "            mask_T = vars(self).setdefault('stale_mask_T', mask_T)",
        "tests/test_control.py tests/cases/test_faults_masks.py tests/cases/test_cases_padding.py",
    ),
    Fault(
        "the sum rule shared evenly",
        "shared_T = torch.where(weight_T.abs() <= resolution_T, 0, left_T / weight_T)",
        "shared_T = torch.where(weight_T.abs() <= resolution_T, 0, left_T / dropped_TK.sum(dim=-1))",
        "tests/experts/test_experts_router_gradient.py",
    ),
    Fault(
        "the row of means twice",
        "return Completion(self.grad_ED - kept_ED, self.means)",
        "return Completion(2 * self.grad_ED - kept_ED, self.means)",
        "tests/experts/test_experts_remainder.py",
    ),
    Fault(
        "a guard that never rests longer",
        "return LayerState(rest=state.pause, pause=2 * state.pause)",
        "return LayerState(rest=state.pause, pause=state.pause)",
        "tests/recalibration/test_guard.py",
    ),
    Fault(
        "a warm-up one step short",
        "if step < config.warmup_steps:",
        "if step + 1 < config.warmup_steps:",
        "tests/recalibration/test_schedule.py",
    ),
    Fault(
        "a lost microbatch",
        "self.position_3 = self.position_3 + self._next_3",
        "self.position_3 = self.position_3 + self._next_3 * (self.position_3[2] < 0)",
        "tests/test_control.py tests/cases/test_faults_stepping.py",
    ),
    # Over ranks.
    Fault(
        "gradients of replicas that stay away",
        "total.index_add_(0, place, part.to(total.dtype))",
        "total.index_add_(0, place, 0 * part.to(total.dtype))",
        "tests/distributed/test_replicas.py",
    ),
    Fault(
        "kept rows combined in another order",
        "rows = torch.empty_like(rows).index_copy_(0, self._order_M, rows)",
        "rows = torch.empty_like(rows).index_copy_(0, self._order_M.flip(0), rows)",
        "tests/distributed/test_backward.py tests/distributed/test_exactness.py",
    ),
    Fault(
        "a swapped rank",
        "send=sent_EG.sum(0).tolist(),",
        "send=(sent_EG.sum(0).tolist() if rank else sent_EG.sum(0).tolist()[::-1]),",
        "tests/distributed/test_exactness.py",
    ),
    Fault(
        "loads told as those of another layer",
        "self.policy.observe(real_GE, layer=layer)",
        "self.policy.observe(real_GE, layer=0)",
        "tests/distributed/test_placed.py tests/distributed/test_policies_train.py",
    ),
    Fault(
        "a split expert's quota by the lower rank alone",
        'quota_EG[expert] = torch.tensor(_same_share(rows, quota), device="cpu")',
        'quota_EG[expert] = torch.tensor(_same_share(rows, quota)[::-1], device="cpu")',
        "tests/balance/test_plan.py tests/cases/test_faults_quotas.py tests/balance/test_lrmoe.py",
    ),
    Fault(
        "draws of a split expert from its beginning",
        "first_S=plan.rows_EG[expert_S, :rank].sum(1).to(device),",
        "first_S=0 * plan.rows_EG[expert_S, :rank].sum(1).to(device),",
        "tests/distributed/test_exactness.py tests/distributed/test_backward.py",
    ),
    Fault(
        "an expert's moments left behind",
        "move(exchange, self._rank, moves[layer], tensors[layer])",
        "move(exchange, self._rank, moves[layer], tensors[layer][:2])",
        "tests/distributed/test_policies_train.py",
    ),
    Fault(
        "no divisor of the experts' gradients",
        "gradient = gradient.div_(dispatched.gradient_divisor)",
        "gradient = gradient.div_(1.0)",
        "tests/distributed/test_training.py tests/distributed/test_parallelize.py",
    ),
    # Hosts and training.
    Fault(
        "a layer that attach leaves out",
        "for name, module in modules.items():\n            module.lrmoe_control = controls[name]",
        "for name, module in list(modules.items())[:1]:\n            module.lrmoe_control = controls[name]",
        "tests/hosts/test_transformers_host.py",
    ),
    Fault(
        "weights of experts in another order",
        "for key in sorted(sources, key=dot_natural_key):",
        "for key in sorted(sources, key=dot_natural_key, reverse=True):",
        "tests/cases/test_faults_hosts.py",
    ),
    Fault(
        "a resume that forgets its step",
        "self.set_step(step)\n        self._guard = guard",
        "self.set_step(0)\n        self._guard = guard",
        "tests/test_control.py tests/hosts/test_trainer_callback.py",
    ),
    Fault(
        "the drop that was scheduled, as the drop in effect",
        "self._last_drop = scheduled, [0.0 if name in instead else drop for name, drop in drops]",
        "self._last_drop = scheduled, [scheduled for name, drop in drops]",
        "tests/test_control.py tests/test_control_guard.py tests/cases/test_faults_implementation.py",
    ),
    # On paper, and studies.
    Fault(
        "replicas of one layer counted for each",
        'copies, per = (slots * L, "L ") if slots_per_layer else (slots, "")',
        'copies, per = (slots * L, "L ") if not slots_per_layer else (slots, "")',
        "tests/cluster/test_cluster_memory.py",
    ),
    Fault(
        "a plan that drops below its floor",
        "min(quota, max(math.ceil(self.min_keep * load), 1))",
        "min(quota, max(math.ceil(self.min_keep * load / 2), 1))",
        "tests/balance/test_lrmoe.py",
    ),
    Fault(
        "time of the gradients' way back",
        '("gradients to tokens", "backward", "network", sent(kept_GG.t() * D * a)),',
        '("gradients to tokens", "backward", "network", sent(0 * kept_GG.t() * D * a)),',
        "tests/cluster/test_cluster_time.py",
    ),
    Fault(
        "a paired difference the wrong way round",
        "differences = [None if None in pair else pair[0] - pair[1] for pair in pairs]",
        "differences = [None if None in pair else pair[1] - pair[0] for pair in pairs]",
        "tests/training/test_compare.py",
    ),
    # Pages and the command line.
    Fault(
        "another column on the page",
        '_percent(row["kept_share"], 1),\n        _percent(row["kept_importance_share"], 2),',
        '_percent(row["kept_importance_share"], 1),\n        _percent(row["kept_share"], 2),',
        "tests/training/test_compare.py tests/test_cli.py",
    ),
    Fault(
        "a name that is not escaped",
        "<dd>{escape(value)}</dd></div>",
        "<dd>{value}</dd></div>",
        "tests/report/test_report_parts.py tests/report/test_report_page.py tests/report/test_paper_pages.py",
    ),
    Fault(
        "overwriting what no run wrote",
        "elif overwrite and entries:\n        raise ValueError(",
        "elif False:\n        raise ValueError(",
        "tests/training/test_train_run.py",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the faults; all if none is given")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--out", type=Path, help="write what came out as JSON")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or fault.name in args.names]
    if args.list:
        print(*(fault.name for fault in chosen), sep="\n")
        return 0
    found = []
    for fault in chosen:
        found.append({"fault": fault.name, **tried(fault)})
        print(f"{found[-1]['result']:8} {fault.name}: {found[-1]['by']} ({found[-1]['seconds']:.0f} s)", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(one["result"] != "caught" for one in found))


def tried(fault: Fault, *, limit_s: float = 900.0) -> dict[str, Any]:
    """What the tests make of a copy of the source with the fault in it: ``caught``, ``MISSED``, ``stale``, ``broken``
    (nothing could be collected, which proves nothing) or ``timeout``."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        times = _replace(source, fault)
        if times != 1:
            return {"result": "stale", "by": f"its text is there {times} times", "seconds": 0.0}
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-m", "not slow", "--tb=line"]
        try:
            run = subprocess.run(
                [*command, "-p", "no:cacheprovider", *fault.tests.split()], cwd=ROOT, timeout=limit_s, check=False,
                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"result": "timeout", "by": f"nothing within {limit_s:.0f} s", "seconds": limit_s}
    failed = re.search(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    result = {0: "MISSED", 1: "caught"}.get(run.returncode, "broken")
    by = failed[1] if failed else run.stdout.strip().rpartition("\n")[2]
    return {"result": result if failed or result != "caught" else "broken", "by": by,
            "seconds": round(time.monotonic() - start, 1)}  # fmt: skip


def _replace(source: Path, fault: Fault) -> int:
    """Puts the fault where its text is; returns how often that was found."""
    times = 0
    for path in sorted((source / "lrmoe").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if count := text.count(fault.old):
            times += count
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return times


if __name__ == "__main__":
    sys.exit(main())
