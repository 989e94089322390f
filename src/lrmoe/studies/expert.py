"""The size of an expert, and the rates at which it is computed and sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lrmoe.config import require_number

if TYPE_CHECKING:
    from lrmoe.balance import Plan


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Size of an expert with gate, up and down projection, and the rates that price it.

    Args:
        dim: D, the model's width.
        expert_dim: F, the expert's.
        flops: multiplications and additions a second that one rank reaches in the experts.
        bandwidth: bytes a second between one rank and the others, in each direction.
        weight_bytes: of one weight, as it is copied to a replica.
        gradient_bytes: of one weight's gradient, as it is sent home.
        optimizer_bytes: of one weight's state: an fp32 master copy and Adam's two moments.
    """

    dim: int = 2048
    expert_dim: int = 768
    flops: float = 4e14
    bandwidth: float = 4e11
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if require_number(name, value) <= 0 or value == float("inf"):
                raise ValueError(f"{name}={value!r} must be a finite number above 0")

    @property
    def parameters(self) -> int:
        """Of one expert: 3 D F."""
        return 3 * self.dim * self.expert_dim

    @property
    def weights(self) -> int:
        """W, bytes of one expert's weights."""
        return self.weight_bytes * self.parameters

    @property
    def gradients(self) -> int:
        """Gr, bytes of one expert's gradients."""
        return self.gradient_bytes * self.parameters

    @property
    def optimizer(self) -> int:
        """O, bytes of one expert's optimizer state."""
        return self.optimizer_bytes * self.parameters

    @property
    def row_seconds(self) -> float:
        """Of one row's forward: 6 D F operations. The backward of a kept row takes twice as long."""
        return 6 * self.dim * self.expert_dim / self.flops

    def replica_bytes(self, plan: Plan) -> int:
        """On the wire in one layer and microbatch, all replicas together."""
        weights = 3 * self.dim * self.expert_dim
        return plan.num_replicas * (2 * self.weight_bytes + self.gradient_bytes) * weights
