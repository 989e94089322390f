"""Faults found while code was moved, beside those of :mod:`freeze.faults`."""

from __future__ import annotations

from freeze.fault_runs import Fault

MORE = (
    Fault(
        name="a-quota-one-too-large",
        why="a quota one too large",
        edits=(
            (
                "return quota_E + _first(by_load_E, target - quota_E.sum()) * room_E",
                "return quota_E + _first(by_load_E, target - quota_E.sum() + 1) * room_E",
            ),
        ),
        tests=("tests/recalibration/test_quota.py",),
    ),
    Fault(
        name="draws-without-the-microbatch",
        why="draws without the microbatch",
        edits=(("for part in (*self.position, stream):", "for part in (*self.position[:3], stream):"),),
        tests=("tests/recalibration/test_draws.py", "tests/experts/test_experts_gradients.py"),
    ),
    Fault(
        name="norms-of-phi-in-another-order",
        why="norms of phi in another order",
        edits=(
            (
                "phi_root_N=saved.phi_root_N.index_select(0, ordered.row_N),",
                "phi_root_N=saved.phi_root_N.flip(0).index_select(0, ordered.row_N),",
            ),
        ),
        tests=("tests/experts/test_experts_gradients.py",),
    ),
    Fault(
        name="the-sum-rule-shared-evenly",
        why="the sum rule shared evenly",
        edits=(
            (
                "shared_T = torch.where(weight_T.abs() <= resolution_T, 0, left_T / weight_T)",
                "shared_T = torch.where(weight_T.abs() <= resolution_T, 0, left_T / dropped_TK.sum(dim=-1))",
            ),
        ),
        tests=("tests/experts/test_experts_router_gradient.py",),
    ),
    Fault(
        name="the-row-of-means-twice",
        why="the row of means twice",
        edits=(
            (
                "return Completion(self.grad_ED - kept_ED, self.means)",
                "return Completion(2 * self.grad_ED - kept_ED, self.means)",
            ),
        ),
        tests=("tests/experts/test_experts_remainder.py",),
    ),
    Fault(
        name="a-guard-that-never-rests-longer",
        why="a guard that never rests longer",
        edits=(
            (
                "return LayerState(rest=state.pause, pause=2 * state.pause)",
                "return LayerState(rest=state.pause, pause=state.pause)",
            ),
        ),
        tests=("tests/recalibration/test_guard.py",),
    ),
    Fault(
        name="a-warm-up-one-step-short",
        why="a warm-up one step short",
        edits=(("if step < config.warmup_steps:", "if step + 1 < config.warmup_steps:"),),
        tests=("tests/recalibration/test_schedule.py",),
    ),
    Fault(
        name="a-lost-microbatch",
        why="a lost microbatch",
        edits=(
            (
                "self.position_3 = self.position_3 + self._next_3",
                "self.position_3 = self.position_3 + self._next_3 * (self.position_3[2] < 0)",
            ),
        ),
        tests=("tests/test_control.py", "tests/cases/test_faults_stepping.py"),
    ),
    Fault(
        name="kept-rows-combined-in-another-order",
        why="kept rows combined in another order",
        edits=(
            (
                "rows = torch.empty_like(rows).index_copy_(0, self._order_M, rows)",
                "rows = torch.empty_like(rows).index_copy_(0, self._order_M.flip(0), rows)",
            ),
        ),
        tests=("tests/distributed/test_backward.py", "tests/distributed/test_exactness.py"),
    ),
    Fault(
        name="swapped-rank",
        why="a swapped rank",
        edits=(
            (
                "send=sent_EG.sum(0).tolist(),",
                "send=(sent_EG.sum(0).tolist() if rank else sent_EG.sum(0).tolist()[::-1]),",
            ),
        ),
        tests=("tests/distributed/test_exactness.py",),
    ),
    Fault(
        name="loads-told-as-those-of-another-layer",
        why="loads told as those of another layer",
        edits=(("self.policy.observe(real_GE, layer=layer)", "self.policy.observe(real_GE, layer=0)"),),
        tests=("tests/distributed/test_placed.py", "tests/distributed/test_policies_train.py"),
    ),
    Fault(
        name="a-split-expert-s-quota-by-the-lower-rank-alone",
        why="a split expert's quota by the lower rank alone",
        edits=(
            (
                'quota_EG[expert] = torch.tensor(_same_share(rows, quota), device="cpu")',
                'quota_EG[expert] = torch.tensor(_same_share(rows, quota)[::-1], device="cpu")',
            ),
        ),
        tests=("tests/balance/test_plan.py", "tests/cases/test_faults_quotas.py", "tests/balance/test_lrmoe.py"),
    ),
    Fault(
        name="draws-of-a-split-expert-from-its-beginning",
        why="draws of a split expert from its beginning",
        edits=(
            (
                "first_S=plan.rows_EG[expert_S, :rank].sum(1).to(device),",
                "first_S=0 * plan.rows_EG[expert_S, :rank].sum(1).to(device),",
            ),
        ),
        tests=("tests/distributed/test_exactness.py", "tests/distributed/test_backward.py"),
    ),
    Fault(
        name="no-divisor-of-the-experts-gradients",
        why="no divisor of the experts' gradients",
        edits=(("gradient = gradient.div_(dispatched.gradient_divisor)", "gradient = gradient.div_(1.0)"),),
        tests=("tests/distributed/test_training.py", "tests/distributed/test_parallelize.py"),
    ),
    Fault(
        name="a-layer-that-attach-leaves-out",
        why="a layer that attach leaves out",
        edits=(
            (
                "for name, module in modules.items():\n            module.lrmoe_control = controls[name]",
                "for name, module in list(modules.items())[:1]:\n            module.lrmoe_control = controls[name]",
            ),
        ),
        tests=("tests/hosts/test_transformers_host.py",),
    ),
    Fault(
        name="the-drop-that-was-scheduled-as-the-drop-in-effect",
        why="the drop that was scheduled, as the drop in effect",
        edits=(
            (
                "self._last_drop = scheduled, [0.0 if name in instead else drop for name, drop in drops]",
                "self._last_drop = scheduled, [scheduled for name, drop in drops]",
            ),
        ),
        tests=("tests/test_control.py", "tests/test_control_guard.py", "tests/cases/test_faults_implementation.py"),
    ),
    Fault(
        name="a-plan-that-drops-below-its-floor",
        why="a plan that drops below its floor",
        edits=(
            (
                "min(quota, max(math.ceil(self.min_keep * load), 1))",
                "min(quota, max(math.ceil(self.min_keep * load / 2), 1))",
            ),
        ),
        tests=("tests/balance/test_lrmoe.py",),
    ),
    Fault(
        name="a-paired-difference-the-wrong-way-round",
        why="a paired difference the wrong way round",
        edits=(
            (
                "differences = [None if None in pair else pair[0] - pair[1] for pair in pairs]",
                "differences = [None if None in pair else pair[1] - pair[0] for pair in pairs]",
            ),
        ),
        tests=("tests/training/test_compare.py",),
    ),
)
