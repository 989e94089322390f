"""Expert parallelism on torch.distributed: the engine, checkpoints, and what a model needs around it."""

from lrmoe.parallel.collectives import RankFailure
from lrmoe.parallel.expert_parallel import ExpertParallel
from lrmoe.parallel.expert_parameters import is_expert, mark_experts
from lrmoe.parallel.gradients import clip_grad_norm_, total_norm
from lrmoe.parallel.metrics import global_metrics
from lrmoe.parallel.parallelize import parallelize

__all__ = [
    "ExpertParallel",
    "RankFailure",
    "clip_grad_norm_",
    "global_metrics",
    "is_expert",
    "mark_experts",
    "parallelize",
    "total_norm",
]
