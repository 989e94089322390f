"""Faults that a change of structure may bring in, and whether the tests notice each.

``python -m freeze.faults [NAME ...] [--list] [--control] [--jobs N] [--out FILE]``: exits with 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from freeze.fault_runs import CAUGHT, MISSED, Fault, Outcome, try_fault, try_nothing
from freeze.more_faults import MORE

TIMEOUT_S = 420.0

OPERATOR = (
    Fault(
        name="weight-is-p",
        why="a kept pair is weighted with its probability p, not with 1/p",
        edits=(("kept_ranks_N, 1.0 / probability_N", "kept_ranks_N, probability_N"),),
        tests=("tests/recalibration/test_selection.py",),
    ),
    Fault(
        name="quota-rounded-down",
        why="the sum of the quotas is rounded down, not to the nearest",
        edits=(
            (
                "load_E.sum().to(torch.float64) + 0.5).to(torch.int64)",
                "load_E.sum().to(torch.float64)).to(torch.int64)",
            ),
        ),
        tests=("tests/recalibration/test_quota.py",),
    ),
    Fault(
        name="alpha-not-squared",
        why="the importance goes with alpha, not with its square",
        edits=(("product_N = alpha_root_N * grad_root_N", "product_N = alpha_root_N.sqrt() * grad_root_N"),),
        tests=("tests/recalibration/test_importance.py",),
    ),
    Fault(
        name="phi-of-another-row",
        why="||phi|| is looked up by pair, though it lies in the order of the experts",
        edits=(
            ("saved.phi_root_N.index_select(0, ordered.row_N)", "saved.phi_root_N.index_select(0, ordered.pair_N)"),
        ),
        tests=("tests/cases/test_cases_router.py",),
    ),
    Fault(
        name="mask-of-an-earlier-call",
        why="a layer keeps the padding mask of its first call for later ones of the same shape",
        edits=(
            (
                "at.tokens.real_rows(x.shape[:-1], batch_major=batch_major)",
                'self.__dict__.setdefault("_rows", {}).setdefault('
                "x.shape[:-1], at.tokens.real_rows(x.shape[:-1], batch_major=batch_major))",
            ),
        ),
        tests=("tests/cases/test_faults_masks.py",),
    ),
    Fault(
        name="draws-without-the-layer",
        why="all layers draw the same numbers",
        edits=(("for part in (*self.position, stream)", "for part in (*self.position[:2], self.position[3], stream)"),),
        tests=("tests/recalibration/test_draws.py",),
    ),
    Fault(
        name="sum-rule-over-all-pairs",
        why="what the kept pairs leave is divided by the weights of all pairs, not of the dropped",
        edits=(("weight_T = torch.where(dropped_TK, alpha_TK, 0).sum", "weight_T = alpha_TK.sum"),),
        tests=("tests/experts/test_experts_router_gradient.py",),
    ),
    Fault(
        name="remainder-of-all-pairs",
        why="the mean row stands for all pairs, those included that are kept",
        edits=(("self.grad_ED - kept_ED", "self.grad_ED"),),
        tests=("tests/experts/test_experts_remainder.py",),
    ),
    Fault(
        name="guard-never-lets-go",
        why="a layer that the guard has stopped rests for ever",
        edits=(("rest=max(0, state.rest - WINDOW)", "rest=max(0, state.rest)"),),
        tests=("tests/recalibration/test_guard.py",),
    ),
    Fault(
        name="dx-without-the-weight",
        why="the input's gradient is not multiplied by the selection weight",
        edits=(
            (
                "dx_MD = grouped_mm(dh_M2F, bank.gate_up_proj, rows.offs_E)",
                "dx_MD = grouped_mm(dh_M2F, bank.gate_up_proj, rows.offs_E).div_(weight_M.unsqueeze(-1))",
            ),
        ),
        tests=("tests/experts/test_experts_gradients.py",),
    ),
)

RANKS = (
    Fault(
        name="gradients-left-as-they-came",
        why="in the backward, kept rows stay in the order of the ranks they came from",
        edits=(("arrived if self._order_M is None else arrived.index_select(0, self._order_M)", "arrived"),),
        tests=("tests/distributed/test_exactness.py",),
    ),
    Fault(
        name="replica-gradient-not-home",
        why="what a replica has of its expert's gradient is not added at home",
        edits=(
            (
                "total.index_add_(0, place, part.to(total.dtype))",
                "total.index_add_(0, place, part.to(total.dtype), alpha=0)",
            ),
        ),
        tests=("tests/distributed/test_replicas.py",),
    ),
    Fault(
        name="split-quota-in-equal-parts",
        why="the quota of an expert with replicas is split evenly, not by their rows",
        edits=(
            (
                "torch.tensor(_same_share(rows, quota), device",
                "torch.tensor([min(count, -(-quota // len(ranks))) for count in rows], device",
            ),
        ),
        tests=("tests/balance/test_plan.py",),
    ),
    Fault(
        name="plans-outlive-the-step",
        why="a plan of the last step is taken again where loads and place are the same",
        edits=(("self._entries.clear()", "len(self._entries)"),),
        tests=("tests/distributed/test_placed.py",),
    ),
    Fault(
        name="moments-stay",
        why="an expert that moves leaves Adam's moments behind",
        edits=(
            (
                "for weight in owned for value in _kept_for(weight, optimizers))",
                "for weight in owned for value in _kept_for(weight, ()))",
            ),
        ),
        tests=("tests/distributed/test_placed.py",),
    ),
    Fault(
        name="kept-rows-not-agreed",
        why="the tokens' ranks take other rows for kept than the experts' ranks keep",
        edits=(("kept_L.nonzero().squeeze(-1)", "kept_L.flip(0).nonzero().squeeze(-1)"),),
        tests=("tests/distributed/test_exactness.py",),
    ),
    Fault(
        name="experts-swapped-in-a-checkpoint",
        why="a rank saves its experts in reverse order",
        edits=(('item.experts.first + place}"] = whole[place]', 'item.experts.first + place}"] = whole[-1 - place]'),),
        tests=("tests/distributed/test_checkpoint.py",),
    ),
    Fault(
        name="loads-without-rank-0",
        why="the router's balancing does not see what the first rank's tokens chose",
        edits=(("load_E=plan.lam_GE.sum(0)", "load_E=plan.lam_GE[1:].sum(0)"),),
        tests=("tests/distributed/test_exactness.py",),
    ),
)

HOSTS = (
    Fault(
        name="layer-not-attached",
        why="the last of several layers gets the control of the first",
        edits=(
            (
                "module.lrmoe_control = controls[name]",
                "module.lrmoe_control = controls[next(iter(controls)) if name in list(controls)[1:][-1:] else name]",
            ),
        ),
        tests=("tests/hosts/test_transformers_host.py",),
    ),
    Fault(
        name="resume-forgets-the-step",
        why="a resumed recalibrator begins at step 0",
        edits=(("self.set_step(step)", "self.set_step(0)"),),
        tests=("tests/hosts/test_trainer_callback.py",),
    ),
    Fault(
        name="experts-permuted-by-name",
        why="weights saved one by one are stacked from the last expert to the first",
        edits=(("sorted(sources, key=dot_natural_key)", "sorted(sources, key=dot_natural_key, reverse=True)"),),
        tests=("tests/hosts/test_trainer_callback.py",),
    ),
    Fault(
        name="gate-and-up-swapped",
        why="the halves of a host's up projection change places",
        edits=(
            (
                "return module.gate_up_proj, module.down_proj",
                "return module.gate_up_proj.roll(module.gate_up_proj.shape[1] // 2, 1), module.down_proj",
            ),
        ),
        tests=("tests/hosts/test_transformers_host.py",),
    ),
)

STUDIES = (
    Fault(
        name="replicas-of-one-layer",
        why="of replicas that every layer has for itself one layer's memory is counted",
        edits=(('(slots * L, "L ") if slots_per_layer', '(slots, "L ") if slots_per_layer'),),
        tests=("tests/cluster/test_cluster_memory.py",),
    ),
    Fault(
        name="more-than-the-largest-drop",
        why="a plan may drop more than what was said to be acceptable",
        edits=(("return min(round(steps * STEP, 10), self.case.max_drop)", "return round(steps * STEP, 10)"),),
        tests=("tests/studies/test_plan_study.py",),
    ),
    Fault(
        name="gradients-travel-for-free",
        why="a layer's time leaves out the way of the gradients back to the tokens",
        edits=(('"network", sent(kept_GG.t() * D * a))', '"network", sent(kept_GG.t() * 0))'),),
        tests=("tests/cluster/test_cluster_time.py",),
    ),
    Fault(
        name="seeds-paired-wrongly",
        why="a loss is held against the baseline of another seed",
        edits=(
            (
                "pairs = [(run[key], other[key]) for run, other in zip(runs, base, strict=True)]",
                "pairs = [(run[key], other[key]) for run, other in zip(runs, base[::-1], strict=True)]",
            ),
        ),
        tests=("tests/training/test_compare.py",),
    ),
)

PAGES = (
    Fault(
        name="another-column",
        why="the table of a comparison shows kept pairs under kept sum R",
        edits=(('_plain("kept_importance_share", lambda', '_plain("kept_share", lambda'),),
        tests=("tests/report/test_report_page.py",),
    ),
    Fault(
        name="name-not-escaped",
        why="the name of a variant goes into the page as it is",
        edits=(("{escape(row.variant)}</span></th>", "{row.variant}</span></th>"),),
        tests=("tests/report/test_report_page.py",),
    ),
    Fault(
        name="overwrite-deletes-all",
        why="--overwrite deletes what it finds in the folder, not what a run wrote",
        edits=(("for name in reversed(OWN_ENTRIES)", "for name in sorted(os.listdir(out))"),),
        tests=("tests/training/test_train_run.py",),
    ),
    Fault(
        name="files-written-in-place",
        why="a file is written where it is read, not aside and moved",
        edits=(('temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")', "temporary = path"),),
        tests=("tests/training/test_run_files.py",),
    ),
)

FAULTS = (*OPERATOR, *RANKS, *HOSTS, *STUDIES, *PAGES, *MORE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m freeze.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try (all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    parser.add_argument("--control", action="store_true", help="first see that their tests pass without a fault")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried side by side (1)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help=f"seconds for one of them ({TIMEOUT_S:g})")
    parser.add_argument("--out", type=Path, help="writes what came of each, as JSON")
    args = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no fault {', '.join(unknown)}; --list shows those there are")
    chosen = [known[name] for name in args.names] or list(FAULTS)
    if args.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.why} ({', '.join(fault.tests)})")
        return 0
    if args.control and (code := _control(chosen, args.timeout)):
        return code
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(lambda fault: _told(fault, try_fault(fault, timeout_s=args.timeout)), chosen))
    caught = sum(outcome.result == CAUGHT for outcome in outcomes)
    print(f"{caught} of {len(chosen)} caught")
    if args.out is not None:
        _write(args.out, chosen, outcomes)
    return int(caught < len(chosen))


def _control(chosen: list[Fault], timeout_s: float) -> int:
    outcome = try_nothing(chosen, timeout_s=timeout_s)
    passed = outcome.result == MISSED
    print("without a fault:", "passed" if passed else outcome, flush=True)
    return int(not passed)


def _told(fault: Fault, outcome: Outcome) -> Outcome:
    print(f"{fault.name}: {outcome}", flush=True)
    return outcome


def _write(path: Path, chosen: list[Fault], outcomes: list[Outcome]) -> None:
    found = [
        {"name": fault.name, "result": outcome.result, "test": outcome.test, "seconds": round(outcome.seconds, 1)}
        for fault, outcome in zip(chosen, outcomes, strict=True)
    ]
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
