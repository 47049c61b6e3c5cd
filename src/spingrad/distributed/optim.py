"""QP-SBGD on many workers: one model each, and a step that all of them take together."""

import re
import zlib
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spingrad._version import __version__
from spingrad.distributed.gather import Gather
from spingrad.distributed.handshake import (
    Facts,
    compare,
    differ,
    digest,
    explain,
    facts_of,
    failure,
    fingerprints,
    named,
    names_of,
    texts,
)
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire
from spingrad.nn import binary_parameters
from spingrad.optim.qpsbgd import QPSBGD, Layer, Params, missing
from spingrad.record import Check, checks
from spingrad.solvers import BlockDescentSolver, Solver
from spingrad.solvers.dimod import to_solver

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

Sizes = list[list[int]]
"""For every layer, the number of its samples and a number for their form."""

FINE, SKIP, FAIL = range(3)  # what a rank says of the values of its step

MADE = "all ranks have to make DistributedQPSBGD with the same model and settings"
UNLIKE = "all ranks have to take the same step with the same model and settings"
DRIFTED = "at step {} the weights are not the same on all ranks; something changed them on some ranks only"


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
        check_every: How often the weights of all ranks are compared, in steps; 0 for never. The settings are
            compared when the optimizer is made and in every step.
        **settings: Those of :class:`~spingrad.QPSBGD`, the same on all workers.

    Example:
        >>> from spingrad import BinaryLinear
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
        >>> model = BinaryLinear(8, 4)
        >>> optimizer = DistributedQPSBGD(binary_parameters(model), reduction="vote")
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        *,
        reduction: Literal["gather", "vote"] = "gather",
        group: dist.ProcessGroup | Wire | None = None,
        solver: "Solver | Sampler | None" = None,
        check_every: int = 100,
        **settings: Any,
    ) -> None:
        self.wire = group if isinstance(group, Wire) else Wire(group)
        self.check_every = check_every
        self._agreed = 0  # number of weights that all ranks are known to have
        self._loaded = False
        try:
            if reduction not in ("gather", "vote"):
                raise ValueError(f'reduction is "gather" or "vote", got {reduction!r}')
            if check_every < 0:
                raise ValueError(f"check_every is at least 0, got {check_every}")
            inner = BlockDescentSolver() if solver is None else to_solver(solver)
            self.reduction = Gather(inner, self.wire) if reduction == "gather" else Vote(inner, self.wire)
            super().__init__(params, lr, solver=self.reduction, per_rank=True, **settings)
        except Exception as error:  # the other ranks wait for the comparison
            compare(self.wire, failure(error), torch.device("cpu"), MADE)
            raise
        compare(self.wire, self._made_with(reduction) | self._in_force(), self._device, MADE)
        self._take_in(self._weights())

    @property
    def votes(self) -> bool:
        """Whether each worker solves its own problem and has its own momentum."""
        return isinstance(self.reduction, Vote)

    @property
    def suspects(self) -> list[int]:
        """Workers whose votes look inverted or random (:mod:`spingrad.distributed.agreement`)."""
        return self.reduction.agreement.suspects() if isinstance(self.reduction, Vote) else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of weights, on all ranks together; those of the first rank are copied to the others."""
        if not self._agreed:  # the constructor is at work, which compares all groups together
            return self._add(param_group)
        before, error = len(self.param_groups), None
        try:
            self._add(param_group)
        except Exception as own:
            error = own
        try:
            self._exchange("add_param_group()", error, sizes=[], check_weights=False)
        except Exception:
            del self.param_groups[before:]
            raise
        self._take_in(self.param_groups[-1]["params"])

    def _add(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for name, weight in zip(names_of(self.param_groups), self._weights(), strict=True):
            if hasattr(weight, "device_mesh"):  # a DTensor; its class takes long to import
                raise TypeError(
                    f"{name} is sharded over the ranks (a DTensor, as fully_shard makes them), but each rank "
                    "needs whole binary weights. Leave them out (torch 2.7 or newer): fully_shard(model, "
                    "ignored_params={weight for _, weight in binary_parameters(model)})"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the next step compares the weights and settings of all ranks."""
        super().load_state_dict(state_dict)
        self._loaded = True

    def layers(self) -> list[Layer]:
        """The weights that take part, with the records that this worker poses its problems from.

        A layer that no rank has used is left out; one that only some ranks have used is an error.
        """
        layers, error = [], None
        try:
            layers = self.recorded()
        except Exception as own:
            error = own
        own_sizes = [_size(layer) for layer in layers]
        sizes = self._exchange("step()", error, own_sizes, error is None and self._check_is_due())
        self._loaded = False
        used = [i for i in range(len(layers)) if any(rank[i][0] >= 0 for rank in sizes)]
        if not used:
            raise RuntimeError(missing(layers))
        layers = [layers[i] for i in used]
        sizes = [[rank[i] for i in used] for rank in sizes]
        self._check_sizes(layers, sizes)
        counts = [[count for count, _ in rank] for rank in sizes]
        records = self.reduction.join([layer.records for layer in layers], counts)
        return [layer._replace(records=own) for layer, own in zip(layers, records, strict=True)]

    def accept(self, layers: list[Layer], found: list[Check], sound: list[bool]) -> bool:
        """Whether the records of all workers are finite: what one worker cannot use, no worker takes."""
        try:
            verdict, error = FINE if super().accept(layers, found, sound) else SKIP, None
        except FloatingPointError as own:
            verdict, error = FAIL, own
        sent = torch.tensor(verdict, dtype=torch.uint8, device=self._device)
        worst = int(self.wire.all_gather(sent).max())
        if worst == FAIL:
            raise FloatingPointError(self._not_finite() or str(error))
        return worst == FINE

    def _not_finite(self) -> str:
        """Whose values are not finite: the records of the step may be those of all ranks, joined."""
        layers = [layer for layer in self.recorded() if layer.records]
        records = [record for layer in layers for record in layer.records]
        found, sound = checks(records, [layer.weight for layer in layers])
        own = ""
        try:
            super().accept(layers, [check for check, _ in found], sound)
        except FloatingPointError as error:
            own = str(error)
        told = texts(self.wire, own, self._device)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)

    def _exchange(self, call: str, error: Exception | None, sizes: Sizes, check_weights: bool) -> list[Sizes]:
        """Compare what is in force on all ranks; the sizes of every rank's records.

        The message is as long as all ranks know it to be, whatever has happened to one of them since. It
        holds a digest of the settings, one of the weights (zeros unless it is due), and the sizes.
        """
        facts = {"call": call} | (self._in_force() if error is None else failure(error))
        rows = [digest(facts), [0, 0], *sizes, *[[0, 0]] * self._agreed][: self._agreed + 2]
        message = torch.tensor(rows, dtype=torch.int32, device=self._device)
        if check_weights:
            prints = fingerprints(self._weights())
            message[1] = fingerprints([prints]).view(torch.int32)
        told = self.wire.all_gather(message).tolist()
        if differ([rank[0] for rank in told]):
            explain(self.wire, facts, self._device, UNLIKE)
        if error is not None:
            raise error
        if all(any(rank[1]) for rank in told) and differ([rank[1] for rank in told]):
            values = zip(names_of(self.param_groups), prints.tolist(), strict=True)
            own = {f"digest of {name}": f"{value % 2**64:016x}" for name, value in values}
            explain(self.wire, own, self._device, DRIFTED.format(self.run["step"]))
        return [rank[2 : 2 + len(sizes)] for rank in told]

    def _check_sizes(self, layers: list[Layer], sizes: list[Sizes]) -> None:
        """The same error on all workers, or the others would wait for the one that has it."""
        for i, layer in enumerate(layers):
            seen = [rank[i] for rank in sizes]
            if without := [rank for rank, (count, _) in enumerate(seen) if count < 0]:
                raise RuntimeError(
                    f"{layer.name}: no backward pass has left a record on {named(without)}. Expected: "
                    "the same backward passes on all ranks; a rank without data makes one with no rows"
                )
            if differ([form for _, form in seen]):
                facts = {f"a record of {layer.name}": _form(layer)}
                explain(self.wire, facts, self._device, "the inputs of the ranks have to be of one form")
            if not any(count for count, _ in seen):
                raise RuntimeError(f"{layer.name}: the record has no rows on any rank; the batch was empty")

    def _take_in(self, weights: list[Tensor]) -> None:
        """Begin with the first rank's values of weights that all ranks have."""
        for weight in weights:
            self.wire.broadcast_(weight.detach())
        self._agreed = len(self._weights())

    def _check_is_due(self) -> bool:
        return self._loaded or (self.check_every > 0 and self.run["step"] % self.check_every == 0)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def _made_with(self, reduction: str) -> Facts:
        """What is compared once."""
        return {
            "spingrad": __version__,
            "torch": str(torch.__version__).partition("+")[0],
            "reduction": reduction,
            "solver": re.sub(r" at 0x[0-9a-f]+", "", repr(self.reduction.inner)),  # without addresses
            "keep_grad": str(self.keep_grad),
            "check_every": str(self.check_every),
        }

    def _in_force(self) -> Facts:
        """What is compared in every step: it can change in a run, by a scheduler or a checkpoint."""
        run = {"step": str(self.run["step"]), "seed": str(self.run["seed"])}
        return run | {"on_nonfinite": self.on_nonfinite} | facts_of(self.param_groups, list(self.defaults))


def data_parallel(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` for the real-valued parameters of a model, not for its binary weights.

    Without it, DDP would send 32 bits for every binary weight, whose gradient nobody needs.

    Args:
        model: A model with binary layers and others.
        **settings: Those of :class:`torch.nn.parallel.DistributedDataParallel`.

    Example:
        >>> from spingrad import BinaryLinear
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
        >>> model = nn.Sequential(BinaryLinear(8, 4), nn.BatchNorm1d(4))
        >>> parallel = data_parallel(model)
        >>> parallel(torch.randn(16, 8)).shape
        torch.Size([16, 4])
        >>> dist.destroy_process_group()
    """
    # The name begins with an underscore, but it is the way that DDP itself documents in its source.
    binary = [name for name, _ in binary_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, binary)
    return DistributedDataParallel(model, **settings)


def _size(layer: Layer) -> list[int]:
    """Samples, nodes or images in the record of a layer, and a number for their form; -1 without a record."""
    if not layer.records:
        return [-1, 0]
    return [len(layer.records[0].rows.data), zlib.crc32(_form(layer).encode()) >> 1]


def _form(layer: Layer) -> str:
    """What the records of all ranks have in common, besides their number of samples."""
    x, grad = layer.records[0].rows.data, layer.records[0].grad
    return (
        f"{x.dtype} with inputs of shape {tuple(x.shape[1:])} and gradients of shape {tuple(grad.shape[1:])}"
    )
