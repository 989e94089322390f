"""Which rank hosts what: integer planning from the loads of one microbatch. No communication, no model."""

from typing import TYPE_CHECKING

from lrmoe import lazy
from lrmoe.balance.registry import get, names

if TYPE_CHECKING:
    from lrmoe.balance.ownership import HistoryPolicy, Move
    from lrmoe.balance.plan import Ownership, Plan, home_ranks
    from lrmoe.balance.policy import BudgetExceeded, Policy

__all__ = ["BudgetExceeded", "HistoryPolicy", "Move", "Ownership", "Plan", "Policy", "get", "home_ranks", "names"]

# Whoever asks for the policies' names, as a command line does, needs no torch.
__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "BudgetExceeded": "lrmoe.balance.policy",
        "HistoryPolicy": "lrmoe.balance.ownership",
        "Move": "lrmoe.balance.ownership",
        "Ownership": "lrmoe.balance.plan",
        "Plan": "lrmoe.balance.plan",
        "Policy": "lrmoe.balance.policy",
        "home_ranks": "lrmoe.balance.plan",
    },
)
