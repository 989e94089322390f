"""Sums and orders inside contiguous segments, against loops over the segments."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.recalibration.segments import Segments


@settings(max_examples=120, deadline=None)
@given(loads=st.lists(st.integers(0, 7), min_size=1, max_size=8), nobody=st.integers(0, 3), seed=st.integers(0, 999))
def test_everything_against_a_loop(loads: list[int], nobody: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(loads) + nobody
    segments = Segments.from_loads(torch.tensor(loads), total)
    # Few distinct values: ties everywhere.
    values = torch.randint(0, 4, (total,), generator=generator).double()
    ends = torch.tensor([*loads, nobody]).cumsum(0).tolist()
    spans = [range(end - count, end) for count, end in zip([*loads, nobody], ends, strict=True)]
    for s, span in enumerate(spans):
        for place, row in enumerate(span):
            assert int(segments.of_N[row]) == s
            assert int(segments.position_N[row]) == place
            assert bool(segments.live_N[row]) == (s < len(loads))
            assert float(segments.running_total(values)[row]) == sum(values[span[0] : row + 1].tolist())
            assert float(segments.remaining_total(values)[row]) == sum(values[row : span[-1] + 1].tolist())
    assert segments.total(values).tolist() == [sum(values[list(span)].tolist()) for span in spans[:-1]]
    assert segments.largest(values).tolist() == [max(values[list(span)].tolist(), default=0.0) for span in spans[:-1]]
    per_expert = torch.arange(1, len(loads) + 1).double()
    assert segments.spread(per_expert).tolist() == [
        float(s + 1) if s < len(loads) else 0.0 for s, span in enumerate(spans) for _ in span
    ]
    wanted = [row for span in spans for row in sorted(span, key=lambda row: (-float(values[row]), row))]
    assert segments.descending(values).tolist() == wanted
    rising = segments.ascending((values * 2**20).to(torch.int64))
    assert rising.tolist() == [row for span in spans for row in sorted(span, key=lambda row: (float(values[row]), row))]
