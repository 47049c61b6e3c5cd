"""Many machines: training steps on a process group of torch, and solvers on a Ray cluster."""

from spinstep.distributed.checkpoint import Checkpoint
from spinstep.distributed.optim import DistributedQPSBGD, data_parallel
from spinstep.distributed.ray import RaySolver
from spinstep.distributed.wire import Wire

__all__ = ["Checkpoint", "DistributedQPSBGD", "RaySolver", "Wire", "data_parallel"]
