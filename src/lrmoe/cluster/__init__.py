"""A cluster on paper: what a model's experts need in memory and time on given hardware, without having it."""

from typing import TYPE_CHECKING

from lrmoe import lazy
from lrmoe.cluster.buffers import Elementwise, Item, TokenBuffers, token_buffers
from lrmoe.cluster.hardware import Hardware, hardware
from lrmoe.cluster.memory import BF16, FP32, Memory, Precision, expert_state, memory
from lrmoe.cluster.model import ModelShape, from_config, model

if TYPE_CHECKING:
    from lrmoe.cluster.scale import Metadata, Planning, measure_planning, metadata
    from lrmoe.cluster.time import LayerTime, Phase, calibrate, layer_time

__all__ = [
    "BF16",
    "FP32",
    "Elementwise",
    "Hardware",
    "Item",
    "LayerTime",
    "Memory",
    "Metadata",
    "ModelShape",
    "Phase",
    "Planning",
    "Precision",
    "TokenBuffers",
    "calibrate",
    "expert_state",
    "from_config",
    "hardware",
    "layer_time",
    "measure_planning",
    "memory",
    "metadata",
    "model",
    "token_buffers",
]

# Models, hardware and memory are plain arithmetic; what works on loads needs torch.
__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "LayerTime": "lrmoe.cluster.time",
        "Metadata": "lrmoe.cluster.scale",
        "Phase": "lrmoe.cluster.time",
        "Planning": "lrmoe.cluster.scale",
        "calibrate": "lrmoe.cluster.time",
        "layer_time": "lrmoe.cluster.time",
        "measure_planning": "lrmoe.cluster.scale",
        "metadata": "lrmoe.cluster.scale",
    },
)
