"""QP-SBGD on many workers: one model each, and a step that all of them take together."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spingrad.distributed.gather import Gather
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire
from spingrad.nn import binary_parameters
from spingrad.optim.qpsbgd import QPSBGD, Layer, Params
from spingrad.record import Check
from spingrad.solvers import BlockDescentSolver, Solver


class DistributedQPSBGD(QPSBGD):
    """:class:`~spingrad.QPSBGD` on the workers of a process group, each with its own rows of the batch.

    ``reduction="gather"`` poses one problem from the rows of all workers, as one machine with the whole
    batch would, and each worker solves a share of its units. With ``reduction="vote"`` each worker solves the
    problem of its own rows, and every weight moves the way of the majority: one bit per weight and worker in
    each direction, whatever the size of the batch.

    Every worker makes the same backward passes, at the end of an epoch perhaps with fewer rows or none, from
    a loss that is a mean over its rows. All then call :meth:`step`. The first worker's weights are copied to
    the others at the start.

    Args:
        params: Latent weights, as for :class:`~spingrad.QPSBGD`.
        lr: Learning rate.
        reduction: ``"gather"`` or ``"vote"``.
        group: The process group; ``None`` is all workers.
        solver: Solves each worker's share. Default: ``BlockDescentSolver()``.
        **settings: Those of :class:`~spingrad.QPSBGD`, the same on all workers.

    Example:
        >>> optimizer = DistributedQPSBGD(binary_parameters(model), reduction="vote")  # doctest: +SKIP
        >>> loss.backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        *,
        reduction: Literal["gather", "vote"] = "gather",
        group: dist.ProcessGroup | Wire | None = None,
        solver: Solver | None = None,
        **settings: Any,
    ) -> None:
        if reduction not in ("gather", "vote"):
            raise ValueError(f'reduction is "gather" or "vote", got {reduction!r}')
        self.wire = group if isinstance(group, Wire) else Wire(group)
        inner = BlockDescentSolver() if solver is None else solver
        self.reduction = Gather(inner, self.wire) if reduction == "gather" else Vote(inner, self.wire)
        super().__init__(params, lr, solver=self.reduction, per_rank=True, **settings)
        for param_group in self.param_groups:
            for weight in param_group["params"]:
                self.wire.broadcast_(weight.detach())

    @property
    def votes(self) -> bool:
        """Whether each worker solves its own problem and has its own momentum."""
        return isinstance(self.reduction, Vote)

    @property
    def suspects(self) -> list[int]:
        """Workers whose votes look inverted or random (:mod:`spingrad.distributed.agreement`)."""
        return self.reduction.agreement.suspects() if isinstance(self.reduction, Vote) else []

    def layers(self) -> list[Layer]:
        """The weights that take part, with the records that this worker poses its problems from."""
        layers = self.recorded()
        sizes = self.wire.all_gather(_sizes(layers)).tolist()
        self._check_sizes(layers, sizes)
        counts = [[count for count, _ in worker] for worker in sizes]
        records = self.reduction.join([layer.records for layer in layers], counts)
        return [layer._replace(records=own) for layer, own in zip(layers, records, strict=True)]

    def accept(self, layers: list[Layer], found: list[Check], sound: list[bool]) -> bool:
        """Whether the records of all workers are finite: what one worker cannot use, no worker takes."""
        error = None
        try:
            fine = super().accept(layers, found, sound)
        except FloatingPointError as own:
            fine, error = False, own
        flags = self.wire.all_gather(torch.tensor([fine], device=layers[0].weight.device))[:, 0].tolist()
        if not all(flags) and (self.on_nonfinite == "raise" or not all(sound)):
            workers = [rank for rank, flag in enumerate(flags) if not flag]
            raise error or FloatingPointError(f"workers {workers}: a layer's input or gradient is not finite")
        return all(flags)

    def _check_sizes(self, layers: list[Layer], sizes: list[list[list[int]]]) -> None:
        """The same error on all workers, or the others would wait for the one that has it."""
        for i, layer in enumerate(layers):
            seen = [worker[i] for worker in sizes]
            if missing := [rank for rank, (count, _) in enumerate(seen) if count < 0]:
                raise RuntimeError(
                    f"{layer.name}: no backward pass has left a record on workers {missing}. Expected: the "
                    "same backward passes on all workers; one that has run out of data makes its with no rows"
                )
            if len({size for _, size in seen}) > 1:
                raise RuntimeError(f"{layer.name}: inputs of workers differ in shape: {seen}")
            if not any(count for count, _ in seen):
                raise RuntimeError(f"{layer.name}: the record has no rows on any worker; the batch was empty")


def data_parallel(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` for the real-valued parameters of a model, not for its binary weights.

    Without it, DDP would send 32 bits for every binary weight, whose gradient nobody needs.

    Args:
        model: A model with binary layers and others.
        **settings: Those of :class:`torch.nn.parallel.DistributedDataParallel`.
    """
    # The name begins with an underscore, but it is the way that DDP itself documents in its source.
    binary = [name for name, _ in binary_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, binary)
    return DistributedDataParallel(model, **settings)


def _sizes(layers: list[Layer]) -> Tensor:  # (layers, 2)
    """Samples, nodes or images of each layer, and the size of one; -1 where there is no record."""
    sizes = [(-1, -1) if not layer.records else _size(layer.records[0].rows.data) for layer in layers]
    return torch.tensor(sizes, dtype=torch.int32, device=layers[0].weight.device)


def _size(data: Tensor) -> tuple[int, int]:
    return len(data), data[:1].numel() if len(data) else data.new_empty(1, *data.shape[1:]).numel()
