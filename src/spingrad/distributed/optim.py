"""QP-SBGD on many ranks: one model each, and a step that all of them take together."""

import re
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from spingrad._version import __version__
from spingrad.distributed.gather import Gather
from spingrad.distributed.handshake import (
    Facts,
    agree,
    compare,
    differ,
    digest,
    explain,
    facts_of,
    failure,
    fingerprints,
    names_of,
)
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire
from spingrad.kernels.passes import lengths
from spingrad.nn import binary_parameters
from spingrad.optim.checks import WITHOUT_SKETCH
from spingrad.optim.qpsbgd import QPSBGD, Gradient, Params, companion_of
from spingrad.solvers import BlockDescentSolver, Solver
from spingrad.solvers.dimod import to_solver

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

SKETCHED = 2
MADE = "all ranks have to make DistributedQPSBGD with the same model and settings"
UNLIKE = "all ranks have to take the same step with the same model and settings"
DRIFTED = "at step {} the weights are not the same on all ranks; something changed them on some ranks only"


class DistributedQPSBGD(QPSBGD):
    """:class:`~spingrad.QPSBGD` on the ranks of a process group, each with its own part of the batch.

    With ``reduction="gather"`` a rank is a pass: gradients are averaged over ranks, sketches are summed, and
    the step is that of one process which accumulates the parts of all ranks. Each rank solves a share of the
    units. With ``reduction="vote"`` each rank solves the problem of its own part, and every weight moves the
    way of the majority: one bit per weight and rank in each direction.

    The loss of a rank is the mean over its own part. Ranks weigh equally, as under
    ``DistributedDataParallel``, however many rows they have; one with an empty batch, or without a backward
    pass, adds zeros, or abstains from the vote. All ranks call :meth:`step` together. The first rank's
    weights are copied to the others at the start.

    Args:
        params: Latent weights, as for :class:`~spingrad.QPSBGD`.
        lr: Learning rate.
        reduction: ``"gather"`` or ``"vote"``.
        group: The process group; ``None`` is all ranks.
        solver: Solves each rank's share. Default: ``BlockDescentSolver()``.
        check_every: How often the weights of all ranks are compared, in steps; 0 for never. The settings are
            compared when the optimizer is made and in every step.
        **settings: Those of :class:`~spingrad.QPSBGD`, the same on all ranks.

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
        """Whether each rank solves its own problem and has its own momentum."""
        return isinstance(self.reduction, Vote)

    @property
    def suspects(self) -> list[int]:
        """Ranks whose votes look inverted or random (:mod:`spingrad.distributed.agreement`)."""
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
            self._exchange("add_param_group()", error, flags=[], check_weights=False)
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

    @_disable_dynamo
    def _step(self) -> None:
        self.reduction.awaited = False
        try:
            super()._step()
        except Exception as error:
            if self.reduction.awaited:
                self.reduction.settle(self._device, error)
            raise

    def gradients(self) -> list[Gradient]:
        """The weights that have a gradient on any rank, and what this rank poses its problems from.

        To gather, a rank is a pass: gradients are averaged, and sketches are summed.
        """
        own: dict[int, Gradient] = {}
        error = None
        try:
            own = {id(gradient.weight): gradient for gradient in super().gradients()}
        except Exception as raised:
            error = raised
        flags = [_flag(own.get(id(weight))) for weight in self._weights()]
        used = self._exchange("step()", error, flags, error is None and self._check_is_due())
        self._loaded = False
        places = [(weight, group) for group in self.param_groups for weight in group["params"]]
        found = [
            own.get(id(weight)) or _nothing(name, weight, group)
            for name, (weight, group), flag in zip(names_of(self.param_groups), places, used, strict=True)
            if flag
        ]
        if SKETCHED not in used:  # an error, unless all gradients are zeros
            return found
        return [_ballot(gradient) for gradient in found] if self.votes else self._joined(found)

    def _joined(self, gradients: list[Gradient]) -> list[Gradient]:
        grads = [gradient.grad / self.wire.size for gradient in gradients]
        sums = self.wire.sums([*grads, *map(_sketch, gradients)])
        parts = zip(gradients, sums[: len(grads)], sums[len(grads) :], strict=True)
        return [
            gradient._replace(grad=grad, sketch=sketch, length=lengths(grad))
            for gradient, grad, sketch in parts
        ]

    def accept(self, gradients: list[Gradient]) -> bool:
        """Whether the gradients of all ranks are finite: what one rank cannot use, no rank takes."""
        fine, error, cause = False, None, None
        try:
            fine = super().accept(gradients)
        except Exception as raised:
            error = cause = raised
            if not self.votes:
                cause = self._own_error()
        self.reduction.awaited = agree(self.wire, self._device, fine, cause)
        if error is not None:  # of the sum alone
            raise error
        return self.reduction.awaited

    def _own_error(self) -> Exception | None:
        """What is wrong with the gradients of this rank, before they are averaged."""
        try:
            super().accept(super().gradients())
        except Exception as error:
            return error
        return None

    def _exchange(
        self, call: str, error: Exception | None, flags: list[int], check_weights: bool
    ) -> list[int]:
        """Compare what is in force on all ranks; the largest flag of each weight.

        The message is as long as all ranks know it to be, whatever has happened to one of them since. It
        holds a digest of the settings, one of the weights (zeros unless it is due), and the flags.
        """
        facts = {"call": call} | (self._in_force() if error is None else failure(error))
        own = [*digest(facts), *[0] * 8, *flags, *[0] * self._agreed][: 16 + self._agreed]
        message = torch.tensor(own, dtype=torch.uint8, device=self._device)
        if check_weights:
            prints = fingerprints(self._weights())
            message[8:16] = fingerprints([prints]).view(torch.uint8)
        told = self.wire.all_gather(message).tolist()
        if differ([rank[:8] for rank in told]):
            explain(self.wire, facts, self._device, UNLIKE)
        if error is not None:
            raise error
        if all(any(rank[8:16]) for rank in told) and differ([rank[8:16] for rank in told]):
            values = zip(names_of(self.param_groups), prints.tolist(), strict=True)
            own_prints = {f"digest of {name}": f"{value % 2**64:016x}" for name, value in values}
            explain(self.wire, own_prints, self._device, DRIFTED.format(self.run["step"]))
        return [max(flags) for flags in zip(*(rank[16:] for rank in told), strict=True)]

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
            "check_every": str(self.check_every),
        }

    def _in_force(self) -> Facts:
        """What is compared in every step: it can change in a run, by a scheduler or a checkpoint."""
        run = {"step": str(self.run["step"]), "seed": str(self.run["seed"])}
        return run | {"on_nonfinite": self.on_nonfinite} | facts_of(self.param_groups, list(self.defaults))


def data_parallel(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` for the real-valued parameters of a model, not for its binary weights.

    Their gradients are :class:`DistributedQPSBGD`'s to average, or not, if it votes; DDP would send them once
    more.

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


def _flag(gradient: Gradient | None) -> int:
    """What a rank has of a weight: nothing, a gradient, or a gradient and a sketch."""
    return 0 if gradient is None else 1 if gradient.sketch is None else SKETCHED


def _nothing(name: str, weight: Tensor, group: dict[str, Any]) -> Gradient:
    """The gradient of a weight that this rank has not used."""
    grad = torch.zeros_like(weight).flatten(1)
    return Gradient(name, weight, group, grad, None, lengths(grad))


def _sketch(gradient: Gradient) -> Tensor:
    """What passes of this rank have left; zeros if there was none."""
    if gradient.sketch is not None:
        return gradient.sketch
    companion = companion_of(gradient.weight)
    if companion is None or companion.leaf is None:  # another optimizer has taken it over, and is gone
        raise RuntimeError(f"{gradient.name}: {WITHOUT_SKETCH}")
    return torch.zeros_like(companion.leaf)


def _ballot(gradient: Gradient) -> Gradient:
    """What a rank votes with. Without rows of its own it abstains, whatever gradient DDP has given it."""
    if gradient.sketch is None:
        return gradient._replace(sketch=_sketch(gradient))
    live = gradient.sketch[:, -1, 0].amax() > 0
    return gradient._replace(length=gradient.length.where(live, 0))
