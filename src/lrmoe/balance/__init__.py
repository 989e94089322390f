"""Which rank hosts what: integer planning from the loads of one microbatch. No communication, no model."""

from lrmoe.balance.plan import Plan, home_ranks
from lrmoe.balance.policy import BudgetExceeded, Policy
from lrmoe.balance.registry import get

__all__ = ["BudgetExceeded", "Plan", "Policy", "get", "home_ranks"]
