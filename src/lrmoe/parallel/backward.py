"""The backward of the routed experts over several ranks: stage by stage, in the order they run.

T tokens, K choices, L pairs of this rank that have an expert, R rows this rank computes, M kept rows, S instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.config import Metric
from lrmoe.experts.backward import backward_stats, complete_by_sum_rule, row_noise
from lrmoe.experts.compacted import Activations, Bank, Needs, RowGradients, Rows, kept_gradients
from lrmoe.experts.meter import BackwardCall, BackwardStats, record
from lrmoe.experts.remainder import Completion, Means
from lrmoe.experts.sequences import kept_by_sequence
from lrmoe.ops.permute import add_to_tokens
from lrmoe.parallel.dispatched import Dispatched
from lrmoe.parallel.dispatcher import Dispatcher, KeptDispatcher
from lrmoe.recalibration import draws
from lrmoe.recalibration.importance import gradient_norms, pair_scores, token_factors
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import Kept, keep_all, select

# What a masked token's pair sends for a score: its experts must not keep it. Scores are never negative.
_MASKED = -1.0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """``row_M``: kept rows by their place in host order, ascending in each instance; ``importance_R``: R of each row in
    host order, 0 for masked ones."""

    row_M: Tensor
    kept: Kept
    importance_R: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedBackward:
    """One backward: what the forward saved, and the stages it takes."""

    dispatched: Dispatched
    needs: Needs
    owned: Bank
    alpha_TK: Tensor
    token_mask_T: Tensor | None
    own_out_TD: Tensor
    y_LD: Tensor
    x_RD: Tensor
    h_parts: tuple[Tensor, Tensor]
    phi_root_R: Tensor
    means_SX: Tensor
    pair_L: Tensor

    def run(self, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of (x, alpha, gate_up_proj, down_proj, gate_up_bias, down_bias); None where not needed.

        1. Weights come again where the ranks' slots hold others by now.
        2. Tokens' ranks send scores, experts' ranks select, and say in a byte a pair what they keep. Where nothing is
           dropped all of this falls away.
        3. Gradients and routing weights of the kept rows are dispatched.
        4. The experts' ranks compute gradients of rows and of weights.
        5. Gradients of rows are combined; the router's are completed for what was dropped.
        6. Gradients of weights go to who owns them.
        """
        dispatched, layout, exchange = self.dispatched, self.dispatched.layout, self.dispatched.exchange
        dispatcher = Dispatcher(exchange, layout)
        banks = dispatched.store.gather_again(exchange, layout, self.owned)
        if layout.all_kept and not dispatched.recording:
            row_M = torch.arange(sum(layout.receive), device=grad_TD.device)
            count_S, weight_M = layout.load_S, torch.ones_like(row_M, dtype=self.alpha_TK.dtype)
            carrier = dispatcher.agree(None)
            self._count_everything()
        else:
            with exchange.phase("select"):
                factor_R = self._factors(grad_TD, dispatcher)
                chosen = self._select(factor_R)
                row_M, count_S = chosen.row_M, chosen.kept.count_E
                weight_M = chosen.kept.weight_M.to(self.alpha_TK.dtype)
            carrier = dispatcher.agree(row_M)
            if dispatched.recording:
                self._record(dispatcher, chosen)
        pair_M = self.pair_L if carrier.sent_M is None else self.pair_L.index_select(0, carrier.sent_M)
        self._meter_sequences(carrier.sent_M)
        with exchange.phase("dispatch gradients"):
            grad_MD = grad_TD.index_select(0, pair_M // self.alpha_TK.shape[1])
        grad_MD = carrier.dispatch(grad_MD, "gradients to experts")
        alpha_M = carrier.dispatch(self.alpha_TK.reshape(-1)[pair_M], "routing weights to experts")
        grad_SD = self._summed_gradients(grad_TD)
        with exchange.phase("backward experts"):
            parts = self._experts(grad_MD, alpha_M, weight_M, row_M, count_S, banks, dispatcher, grad_SD)
        del grad_MD, banks
        dx = dalpha = None
        if self.needs.x:
            dx_MD = carrier.combine(_joined([part.dx_MD for part in parts]), "gradients to tokens")
            with exchange.phase("combine gradients"):
                dx = add_to_tokens(dx_MD, pair_M, *self.alpha_TK.shape)
        if self.needs.alpha:
            dalpha = self._router_gradient(grad_TD, _joined([part.dalpha_M for part in parts]), carrier, pair_M)
        return dx, dalpha, *self._weight_gradients(parts)

    def _factors(self, grad_TD: Tensor, dispatcher: Dispatcher) -> Tensor:
        """(R, 1 or 2) in host order: the tokens' side of the score; a second column, where the selection goes by
        another metric, for the importance that is reported."""
        top_k = self.alpha_TK.shape[1]
        token_L = self.pair_L // top_k
        alpha_L = self.alpha_TK.reshape(-1)[self.pair_L]
        columns = []
        for metric in dict.fromkeys([self.dispatched.recipe.metric, "lrm"]):
            norm_L = gradient_norms(metric, grad_TD).index_select(0, token_L)
            factor_L = token_factors(metric, alpha_N=alpha_L, grad_norm_N=norm_L)
            if self.token_mask_T is not None:
                factor_L = factor_L.masked_fill(~self.token_mask_T[token_L], _MASKED)
            columns.append(factor_L)
        return dispatcher.in_host_order(dispatcher.dispatch(torch.stack(columns, 1), "scores to experts"))

    def _select(self, factor_R: Tensor) -> _Chosen:
        layout, recipe = self.dispatched.layout, self.dispatched.recipe
        # Not "is >= 0": a score that overflowed is NaN, and kept.
        masked_R = factor_R[:, 0] < 0
        row_R = torch.arange(factor_R.shape[0], device=factor_R.device)
        if self.dispatched.layout.load_S.sum() < row_R.numel():
            # Rows of nobody come last, behind all instances.
            rows_S = torch.cat([bank.offs_S.to(torch.int64) + bank.rows.start for bank in layout.banks])
            instance_R = torch.bucketize(row_R, rows_S, right=True)
            row_R = torch.argsort(torch.where(masked_R, rows_S.numel(), instance_R), stable=True)
        segments = Segments.from_loads(layout.load_S, row_R.numel())
        source = draws.Source(self.dispatched.position, layout.expert_S, layout.first_S)
        phi_root_R = self.phi_root_R.index_select(0, row_R)

        def scores(metric: Metric, column: int) -> Tensor:
            return pair_scores(
                metric,
                token_factor_N=factor_R[:, column].index_select(0, row_R),
                phi_root_N=phi_root_R,
                noise_N=row_noise(source, segments) if metric == "random" else None,
            )

        score_R = scores(recipe.metric, 0)
        if torch.equal(layout.quota_S, layout.load_S):
            kept = keep_all(segments)
        else:
            kept = select(
                score_R,
                segments,
                layout.quota_S,
                selector=recipe.selector,
                source=source,
                error_budget=recipe.error_budget,
                pooled=recipe.quota == "pooled",
            )
        if self.dispatched.meter is not None:
            lrm_R = score_R if recipe.metric == "lrm" else scores("lrm", -1)
            stats = backward_stats(kept, lrm_R, segments, layout.load_S, by_lrm=recipe.metric == "lrm")
            self._meter(stats)
        importance_R = torch.where(segments.live_N, score_R, 0.0).square()
        return _Chosen(
            row_R.index_select(0, kept.index_M),
            kept,
            torch.empty_like(importance_R).index_copy_(0, row_R, importance_R),
        )

    def _summed_gradients(self, grad_TD: Tensor) -> Tensor | None:
        """(S, D): the sum of alpha g over each instance's rows; None where nothing is completed."""
        dispatched, needs = self.dispatched, self.needs
        if dispatched.sums is None or not (
            needs.gate_up_proj or needs.down_proj or needs.gate_up_bias or needs.down_bias
        ):
            return None
        return dispatched.sums.all_to_all(
            grad_TD, self.alpha_TK, self.token_mask_T, self.pair_L, dispatched.exchange, dispatched.layout
        )

    def _experts(
        self,
        grad_MD: Tensor,
        alpha_M: Tensor,
        weight_M: Tensor,
        row_M: Tensor,
        count_S: Tensor,
        banks: Sequence[Bank],
        dispatcher: Dispatcher,
        grad_SD: Tensor | None,
    ) -> list[RowGradients]:
        """Gradients of the kept rows and of the weights, bank after bank."""
        source_M = dispatcher.received_place(row_M)
        all_kept = row_M.numel() == self.phi_root_R.numel()
        parts = []
        start = 0
        for bank, place, h_R2F in zip(banks, self.dispatched.layout.banks, self.h_parts, strict=False):
            offs_S = count_S[place.instances].cumsum(0)
            chosen = slice(start, start + (int(offs_S[-1]) if offs_S.numel() else 0))
            start = chosen.stop
            completion = None
            if grad_SD is not None:
                means = Means.unpacked(self.means_SX[place.instances], bank.down_proj.shape[2])
                completion = Completion(grad_SD[place.instances], means)
            parts.append(
                kept_gradients(
                    grad_MD[chosen],
                    alpha_M[chosen],
                    weight_M[chosen],
                    Rows(
                        row_M[chosen] - place.rows.start,
                        source_M[chosen],
                        offs_S.to(torch.int32),
                        all_kept=all_kept,
                    ),
                    Activations(self.x_RD, h_R2F),
                    bank,
                    self.dispatched.recipe,
                    self.needs,
                    completion,
                )
            )
        return parts

    def _router_gradient(self, grad_TD: Tensor, dalpha_M: Tensor, carrier: KeptDispatcher, pair_M: Tensor) -> Tensor:
        """d(routing weights), (T, K): exact for kept pairs, by ``router_grad`` for dropped ones."""
        alpha_TK, recipe = self.alpha_TK, self.dispatched.recipe
        dalpha_M = carrier.combine(dalpha_M, "routing weight gradients to tokens")
        dalpha_N = alpha_TK.new_zeros(alpha_TK.numel())
        dalpha_N[pair_M] = dalpha_M
        if recipe.router_grad == "kept" or self.dispatched.layout.all_kept:
            return dalpha_N.view_as(alpha_TK)
        live_L = torch.ones_like(self.pair_L, dtype=torch.bool)
        if self.token_mask_T is not None:
            live_L = self.token_mask_T[self.pair_L // alpha_TK.shape[1]]
        kept_N = torch.zeros(alpha_TK.numel(), dtype=torch.bool, device=alpha_TK.device)
        kept_N[pair_M] = True
        if recipe.router_grad == "sum_rule":
            live_N = torch.zeros_like(kept_N).index_copy_(0, self.pair_L, live_L)
            return complete_by_sum_rule(grad_TD, self.own_out_TD, alpha_TK, dalpha_N, kept_N, live_N)
        dropped_L = (live_L & ~kept_N[self.pair_L]).nonzero().squeeze(-1)
        dropped_M = self.pair_L.index_select(0, dropped_L)
        grad_MD = grad_TD.index_select(0, dropped_M // alpha_TK.shape[1]).to(alpha_TK.dtype)
        dalpha_N[dropped_M] = (grad_MD * self.y_LD.index_select(0, dropped_L)).sum(-1)
        return dalpha_N.view_as(alpha_TK)

    def _weight_gradients(self, parts: list[RowGradients]) -> list[Tensor | None]:
        """Gradients of what this rank owns, from all ranks that computed with it."""
        dispatched = self.dispatched
        gradients: list[Tensor | None] = []
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
            if not getattr(self.needs, name):
                gradients.append(None)
                continue
            of_banks = [getattr(part, name) for part in parts]
            gradient = dispatched.store.reduce(
                dispatched.exchange, dispatched.layout, getattr(self.owned, name), of_banks
            )
            if dispatched.gradient_divisor != 1.0:
                gradient = gradient.div_(dispatched.gradient_divisor)
            gradients.append(gradient)
        return gradients

    def _meter(self, stats: BackwardStats) -> None:
        """Reports what this rank computed, by expert, and all ranks' loads to the router's balancing."""
        meter, layout = self.dispatched.meter, self.dispatched.layout
        if meter is None:
            return

        def by_expert(count_S: Tensor) -> Tensor:
            return torch.zeros_like(self.dispatched.load_E).index_add_(0, layout.expert_S, count_S)

        meter.add(
            BackwardStats(
                load_E=by_expert(stats.load_E),
                kept_E=by_expert(stats.kept_E),
                importance_total=stats.importance_total,
                importance_kept=stats.importance_kept,
                variance=stats.variance,
            ),
            routed_E=self.dispatched.load_E,
        )

    def _meter_sequences(self, sent_M: Tensor | None) -> None:
        """Reports what this rank's own sequences keep; ``sent_M``: which rows in send order, None for all."""
        meter, sequence_T = self.dispatched.meter, self.dispatched.sequence_T
        if meter is None or sequence_T is None:
            return
        token_L = self.pair_L // self.alpha_TK.shape[1]
        if self.token_mask_T is not None:
            token_L = torch.where(self.token_mask_T[token_L], token_L, -1)
        meter.add_sequences(kept_by_sequence(sequence_T, token_L, token_L if sent_M is None else token_L[sent_M]))

    def _count_everything(self) -> None:
        # Without a selection nobody has asked for scores: shares of an importance of zero read as whole.
        none = torch.zeros((), dtype=torch.float64, device=self.phi_root_R.device)
        load_S = self.dispatched.layout.load_S
        self._meter(
            BackwardStats(load_E=load_S, kept_E=load_S, importance_total=none, importance_kept=none, variance=none)
        )

    def _record(self, dispatcher: Dispatcher, chosen: _Chosen) -> None:
        """Tells the tokens' ranks, for :func:`lrmoe.recording`, what became of each of their pairs."""
        told_R3 = torch.zeros(chosen.importance_R.numel(), 3, dtype=torch.float64, device=chosen.row_M.device)
        told_R3[chosen.row_M, 0] = 1.0
        told_R3[chosen.row_M, 1] = chosen.kept.weight_M
        told_R3[:, 2] = chosen.importance_R
        told_L3 = dispatcher.combine(told_R3, "record to tokens")
        shape = self.alpha_TK.shape
        told_N3 = told_L3.new_zeros(shape.numel(), 3).index_copy_(0, self.pair_L, told_L3)
        _, step, layer, microbatch = self.dispatched.position
        record(
            BackwardCall(
                step=step,
                layer=layer,
                microbatch=microbatch,
                kept_TK=told_N3[:, 0].bool().view(shape),
                weight_TK=told_N3[:, 1].float().view(shape),
                importance_TK=told_N3[:, 2].view(shape),
                quota_E=self.dispatched.quota_E.clone(),
                load_E=self.dispatched.load_E.clone(),
            )
        )


def _joined(parts: list[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None]) if len(parts) > 1 else parts[0]  # type: ignore[return-value]
