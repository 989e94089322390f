"""Which rank hosts what: integer planning from the loads of one microbatch. No communication, no model."""

from lrmoe.balance.ownership import HistoryPolicy, Move
from lrmoe.balance.plan import Ownership, Plan, home_ranks
from lrmoe.balance.policy import BudgetExceeded, Policy
from lrmoe.balance.registry import get, names

__all__ = ["BudgetExceeded", "HistoryPolicy", "Move", "Ownership", "Plan", "Policy", "get", "home_ranks", "names"]
