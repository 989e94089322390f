"""Expert parallelism on torch.distributed: the engine, checkpoints, and what a model needs around it."""

from lrmoe.parallel.collectives import RankFailure
from lrmoe.parallel.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel", "RankFailure"]
