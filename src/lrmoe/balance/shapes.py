"""Names of the synthetic loads that :mod:`lrmoe.balance.workloads` makes."""

SHAPES = ("balanced", "hot_experts", "hot_rank", "spread", "ragged", "empty", "rotating", "burst")
WORKLOADS = (*SHAPES, "zipf")
"""Of runs: the shapes, and Zipf's law."""
