"""QP-SBGD on many workers: one model each, and a step that all of them take together."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spingrad.distributed.gather import Gather
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire
from spingrad.nn.linear import binary_parameters
from spingrad.optim.qpsbgd import QPSBGD, Params, _Layer
from spingrad.problem import BinaryLeastSquares
from spingrad.record import LayerRecord
from spingrad.rows import Patches
from spingrad.scaling import idle_units
from spingrad.solvers import BlockDescentSolver, Solver


class DistributedQPSBGD(QPSBGD):
    """:class:`~spingrad.QPSBGD` on the workers of a process group, each with its own rows of the batch.

    ``reduction="gather"`` poses one problem from the rows of all workers, as one machine with the whole
    batch would, and each worker solves a share of its units. ``reduction="vote"`` lets each worker solve its
    own rows and moves every weight the way of the majority: one bit for each weight and worker, back and
    forth, whatever the batch.

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
        super().__init__(params, lr, solver=self.reduction, **settings)
        for param_group in self.param_groups:
            for weight in param_group["params"]:
                self.wire.broadcast_(weight.detach())

    @property
    def votes(self) -> bool:
        return isinstance(self.reduction, Vote)

    @property
    def suspects(self) -> list[int]:
        """Workers whose votes look inverted or random; see :class:`~spingrad.distributed.agreement.Trust`."""
        return self.reduction.trust.suspects() if isinstance(self.reduction, Vote) else []

    def _layers(self) -> list[_Layer]:
        layers = self._recorded()
        rows = self.wire.all_gather(_sizes(layers)).tolist()
        self._check_rows(layers, rows)
        counts = [[layer[:2] for layer in worker] for worker in rows]
        records = self.reduction.join([layer.records for layer in layers], counts)
        return [layer._replace(records=own) for layer, own in zip(layers, records, strict=True)]

    def _check_rows(self, layers: list[_Layer], rows: list[list[list[int]]]) -> None:
        """The same error on all workers, or the others would wait for the one that has it."""
        for i, layer in enumerate(layers):
            seen = [worker[i] for worker in rows]
            if missing := [rank for rank, (x, _, _) in enumerate(seen) if x < 0]:
                raise RuntimeError(
                    f"{layer.name}: no backward pass has left a record on workers {missing}. Expected: the "
                    "same backward passes on all workers; one that has run out of data makes its with no rows"
                )
            if len({size for _, _, size in seen}) > 1:
                raise RuntimeError(f"{layer.name}: inputs of workers differ in shape: {seen}")
            if not any(x for x, _, _ in seen):
                raise RuntimeError(f"{layer.name}: the record has no rows on any worker; the batch was empty")

    def _finite(self, layers: list[_Layer]) -> bool:
        """What one worker cannot use, no worker takes."""
        error = None
        try:
            fine = super()._finite(layers)
        except FloatingPointError as found:
            fine, error = False, found
        flags = self.wire.all_gather(torch.tensor([fine], device=layers[0].weight.device))[:, 0]
        if not flags.all() and self.on_nonfinite == "raise":
            workers = (~flags).nonzero()[:, 0].tolist()
            raise error or FloatingPointError(f"workers {workers}: a layer's input or gradient is not finite")
        return bool(flags.all())

    def _pose(self, layer: _Layer) -> tuple[list[BinaryLeastSquares], list[Tensor | None], Tensor | None]:
        problems, idle, average = super()._pose(layer)
        if isinstance(self.reduction, Vote):  # a unit that rests here may have to move: the others decide
            self.reduction.resting += [
                idle_units(record.grad) if own is None else own
                for record, own in zip(layer.records, idle, strict=True)
            ]
            idle = [None] * len(idle)
        return problems, idle, average


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


def _sizes(layers: list[_Layer]) -> Tensor:  # (layers, 3)
    """Rows of ``x`` and ``grad``, and the size of a row of ``x``; -1 where there is no record."""
    sizes = [_size(layer.records[0]) if layer.records else (-1, -1, -1) for layer in layers]
    return torch.tensor(sizes, dtype=torch.int32, device=layers[0].weight.device)


def _size(record: LayerRecord) -> tuple[int, int, int]:
    if not isinstance(record.x, Patches):
        return len(record.x), len(record.grad), record.x.shape[1]
    shapes = {images.shape[1:] for images in record.x.images}
    if len(shapes) > 1:
        raise ValueError(f"workers share images of one size, got {sorted(map(tuple, shapes))}")
    return sum(map(len, record.x.images)), len(record.grad), shapes.pop().numel()
