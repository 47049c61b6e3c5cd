"""Many machines: training steps on a process group of torch, and solvers on a Ray cluster."""

from spingrad.distributed.ddp import data_parallel
from spingrad.distributed.ray import RaySolver
from spingrad.distributed.wire import Wire

__all__ = ["RaySolver", "Wire", "data_parallel"]
