"""QP-SBGD: each layer's gradient, projected onto spins, moves its latent weights."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from spingrad._memory import is_free
from spingrad._numbers import check_whole
from spingrad.optim import functional
from spingrad.optim.checks import (
    HOOKED,
    IN_EVALUATION,
    NOT_BINARY,
    NOT_FINITE,
    OTHER_GRADIENT,
    check_dtype,
    check_settings,
    check_state,
    check_weight,
    completed,
    solved,
    to_plain,
)
from spingrad.optim.ranks import check_ranks
from spingrad.problem import BinaryQuadratic
from spingrad.record import Check, LayerRecord, checks
from spingrad.recording import Record, end, has_gradient_of_its_own, record_of, start_recording
from spingrad.scaling import TargetRms, Weighting
from spingrad.solvers.base import Solution, Solver, derive_seed
from spingrad.solvers.block_descent import BlockDescentSolver
from spingrad.solvers.dimod import to_solver
from spingrad.solvers.exact import ExactSolver

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class Layer(NamedTuple):
    """A weight that takes part in a step.

    Args:
        name: What error messages call it.
        weight: The latent weight.
        group: The settings of its parameter group.
        records: What backward passes have left on it, one per group of channels; none if nothing.
    """

    name: str
    weight: Tensor
    group: dict[str, Any]
    records: list[LayerRecord]


class QPSBGD(Optimizer):
    """Quantum projected stochastic binary-gradient descent (Krahn et al., BMVC 2024).

    For each layer with inputs ``X`` and output gradient ``V``, one step is

        ``G = argmin over G ∈ {-1,+1} of ‖Z G‖² - 2⟨H, G⟩``  and  ``Ω ← clamp(Ω - lr · G)``,

    where ``Z`` are the inputs, scaled, and ``H`` is a running average of ``ZᵀV``. The functions of
    :mod:`spingrad.optim.functional` compute it. All layers go to the solver together.

    It takes the weights of binary layers only: ``binary_parameters(model)``; others belong to an ordinary
    torch optimizer. Its layers record inputs and output gradients instead of computing ``weight.grad``, which
    is a tensor of zeros while there is a record.

    Args:
        params: Latent weights, with names (``binary_parameters(model)``), without, or in groups.
        lr: Learning rate, the distance that every latent weight moves in a step.
        solver: Solves the projection: a solver, or any dimod sampler. Default: ``BlockDescentSolver()``.
        target_rms: Root mean square of each unit's target, in units of what its spins can reach; ``"auto"``
            chooses it by how many rows of the batch share their inputs. Small values trust the quadratic
            model, large ones approach signSGD, ``None`` is the paper.
        momentum: Weight of the past in the linear term ``ZᵀV``; the quadratic term is that of the batch.
        whitening: How much weaker the linear term becomes in directions which the units of a layer share, as
            in :func:`~spingrad.scaling.whitened`. 1 can raise the accuracy of networks with hardtanh, and
            lowers it with sign activations. A step takes longer.
        rank: How many leading directions of the inputs the quadratic term keeps; ``None`` for all.
        rows: ``"uniform"``, or ``"normalized"`` as in the paper.
        clamp: Largest magnitude of a latent weight; ``None`` for no limit.
        seed: Seed of the run. The solver's seeds follow from it, the step and the layer.
        on_nonfinite: ``"raise"`` an error that names the layer, or ``"skip"`` the whole step.
        keep_grad: Compute ``weight.grad`` too, for monitoring.
        per_rank: Allow a process group of several ranks, each of which then trains a model of its own.
            :class:`~spingrad.distributed.DistributedQPSBGD` trains one model on all ranks.

    Attributes:
        run: State of the whole run, the same for every parameter group and part of ``state_dict()``: its
            ``seed``, the number of the next ``step``, and the number of steps that were ``skipped``.

    Note:
        Beyond the publication, targets are scaled into reach, momentum averages the linear term, the
        quadratic term is truncated to its leading directions, all rows weigh the same, rows and units without
        a gradient are left out, and latent weights are clamped. :meth:`as_published` takes all of it back.

    Example:
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = torch.nn.Sequential(BinaryLinear(4, 3), torch.nn.Hardtanh(), BinaryLinear(3, 2))
        >>> optimizer = QPSBGD(binary_parameters(model), lr=3e-3)
        >>> model(torch.ones(5, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        *,
        solver: "Solver | Sampler | None" = None,
        target_rms: TargetRms = "auto",
        momentum: float = 0.9,
        whitening: float = 0.0,
        rank: int | None = 32,
        rows: Weighting = "uniform",
        clamp: float | None = 1.0,
        seed: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        keep_grad: bool = False,
        per_rank: bool = False,
    ) -> None:
        check_ranks(per_rank)
        self.per_rank = per_rank
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite is "raise" or "skip", got {on_nonfinite!r}')
        self.solver = BlockDescentSolver() if solver is None else to_solver(solver)
        self.on_nonfinite = on_nonfinite
        self.keep_grad = keep_grad
        check_whole("seed", seed, 0)
        self.run = {"seed": index(seed), "step": 0, "skipped": 0}
        self._spare: dict[Tensor, Tensor] = {}  # the averages of one step before, as memory for the next
        settings = dict(lr=lr, target_rms=target_rms, momentum=momentum, whitening=whitening)
        super().__init__(params, to_plain(settings | dict(rank=rank, rows=rows, clamp=clamp)))

    @classmethod
    def as_published(
        cls, params: Params, lr: float, solver: "Solver | Sampler | None" = None, **settings: Any
    ) -> Self:
        """The paper to the letter: its rows, its target, no clamp, and the problem solved exactly.

        The paper's layers have ``scale=False``. Layers of more than about 60 inputs need another ``solver``.

        Args:
            params: Latent weights, as for the class.
            lr: Learning rate.
            solver: Default: ``ExactSolver()``.
            **settings: What the paper leaves open, such as ``seed`` or ``on_nonfinite``.
        """
        solver = ExactSolver() if solver is None else solver
        paper: dict[str, Any] = dict(target_rms=None, momentum=0.0, whitening=0.0, rank=None)
        paper |= dict(rows="normalized", clamp=None)
        return cls(params, lr, solver=solver, **paper, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(to_plain(param_group))
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for i, weight in enumerate(group["params"]):
                check_weight(_name(group, i), weight)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._start_recording(group)

    def _start_recording(self, group: dict[str, Any]) -> None:
        """Its weights record as long as this optimizer lives."""
        records = [weakref.ref(start_recording(weight, self.keep_grad)) for weight in group["params"]]
        weakref.finalize(self, end, records).atexit = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Project every layer's gradient onto spins and move its weights; uses up the records.

        A step that raises has moved nothing and can be taken again.
        """
        check_ranks(self.per_rank)  # the process group may be younger than the optimizer
        loss = evaluate(closure)
        with _without_autocast(self.param_groups):
            self._step()
        return loss

    @_disable_dynamo  # a compiled training step calls it as it is
    def _step(self) -> None:
        layers = self.layers()
        weights = [layer.weight for layer in layers]
        found, sound = checks([r for layer in layers for r in layer.records], weights)  # the one read back
        if self.accept(layers, [check for check, _ in found], sound):
            ready = iter(found)
            posed = [self.pose(self._prepared(layer, ready)) for layer in layers]
            seed = derive_seed(self.run["seed"], self.run["step"])
            problems = [problem for own, _ in posed for problem in own]
            solutions = iter(solved(self.solver, problems, seed))
            for layer, (own, exp_avg) in zip(layers, posed, strict=True):
                self._move(layer, [next(solutions) for _ in own], exp_avg)
        else:
            self.run["skipped"] += 1
        self.run["step"] += 1
        for record in self._records():
            record.consume()

    def layers(self) -> list[Layer]:
        """The weights that take part in the step, with what backward passes have left on them.

        A weight that no backward pass has used since the last step stays as it is, as in torch's optimizers.
        """
        recorded = self.recorded()
        layers = [layer for layer in recorded if layer.records and len(layer.records[0].rows)]
        if not layers:
            raise RuntimeError(missing(recorded))
        return layers

    def recorded(self) -> list[Layer]:
        """Every weight that trains, with its records, if it has any."""
        layers = []
        for group in self.param_groups:
            check_settings(group)  # a scheduler may have changed them
            for i, weight in enumerate(group["params"]):
                name = _name(group, i)
                check_dtype(name, weight)  # a model can change its dtype at any time
                if not weight.requires_grad:
                    continue
                records = record.layers() if (record := record_of(weight)) else []
                if not records and has_gradient_of_its_own(weight):
                    raise RuntimeError(f"{name}: {NOT_BINARY}")
                if record and record.in_evaluation:
                    raise RuntimeError(f"{name}: {IN_EVALUATION}")
                if records and record and record.is_hooked():
                    raise RuntimeError(f"{name}: {HOOKED}")
                if record and record.has_other_gradient():
                    raise RuntimeError(f"{name}: {OTHER_GRADIENT}")
                layers.append(Layer(name, weight, group, records))
        return layers

    def accept(self, layers: list[Layer], found: list[Check], sound: list[bool]) -> bool:
        """Whether all records are finite; if not, the step is skipped or an error names the layer.

        A latent weight that is not finite is an error in any case.

        Args:
            layers: The weights that take part in the step.
            found: The checks of all their records.
            sound: Whether each weight is finite.
        """
        for layer, is_sound in zip(layers, sound, strict=True):
            if not is_sound:
                raise FloatingPointError(f"{layer.name}: {NOT_FINITE}")
        names = [layer.name for layer in layers for _ in layer.records]
        bad = [name for name, check in zip(names, found, strict=True) if not check.finite]
        if bad and self.on_nonfinite == "raise":
            raise FloatingPointError(
                f"{bad[0]}: the layer's input or output gradient is not finite; look for an overflow "
                'in the loss or a lower layer, or pass on_nonfinite="skip"'
            )
        return not bad

    def _prepared(self, layer: Layer, found: Iterator[tuple[Check, Tensor]]) -> Layer:
        settings = {name: layer.group[name] for name in ("rows", "target_rms")}
        try:
            records = [functional.prepared(record, next(found), **settings) for record in layer.records]
        except FloatingPointError as error:
            raise FloatingPointError(f"{layer.name}: {error}") from None
        return layer._replace(records=records)

    def pose(self, layer: Layer) -> tuple[list[BinaryQuadratic], Tensor | None]:
        """The problems of one layer's step and the new average of its linear term, if there is momentum.

        There is one problem per group of channels. Override this method to try another step.
        """
        settings = {name: layer.group[name] for name in ("rows", "target_rms", "momentum", "rank")}
        state = self.state.get(layer.weight, {}) if settings["momentum"] else {}
        past = [None] * len(layer.records)
        if "exp_avg" in state:
            dtype = layer.records[0].grad.dtype
            past = state["exp_avg"].flatten(1).to(dtype).chunk(len(layer.records))
        step = state.get("step", 0)
        if len(layer.records) == 1:
            out = self._memory_for(layer)
            problems = [functional.pose(*layer.records, **settings, exp_avg=past[0], step=step, out=out)]
        else:
            pairs = zip(layer.records, past, strict=True)
            problems = [functional.pose(r, **settings, exp_avg=own, step=step) for r, own in pairs]
        averages = [problem.H.T for problem in problems]
        if layer.group["whitening"]:
            problems = [functional.whiten(problem, layer.group["whitening"]) for problem in problems]
        if not settings["momentum"]:
            return problems, None
        joined = averages[0] if len(averages) == 1 else torch.cat(averages)
        return problems, joined.view(layer.weight.shape)

    def _memory_for(self, layer: Layer) -> Tensor | None:
        """The average of one step before, if nobody looks at it any more: new memory would cost more time."""
        spare = self._spare.pop(layer.weight, None)  # if the step raises, memory is made anew
        if spare is None or spare.dtype != layer.records[0].grad.dtype or not is_free(spare):
            return None
        return spare.flatten(1)

    def _move(self, layer: Layer, solutions: list[Solution], exp_avg: Tensor | None) -> None:
        group, weight = layer.group, layer.weight
        lr, clamp = float(group["lr"]), group["clamp"]
        rows = weight.flatten(1)  # (m, n)
        for part, solution in zip(rows.chunk(len(solutions)), solutions, strict=True):
            functional.move_(part, solution.spins.T, solution.problem.idle, lr, clamp)
        if rows.data_ptr() != weight.data_ptr():  # channels last: the rows were a copy
            weight.copy_(rows.view_as(weight))
        if exp_avg is not None:
            state = self.state[weight]
            if "exp_avg" in state:
                self._spare[weight] = state["exp_avg"]
            state.update(step=state.get("step", 0) + 1, exp_avg=exp_avg)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the records of all weights."""
        super().zero_grad(set_to_none)
        for record in self._records():
            record.clear()

    def _records(self) -> list[Record]:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return [record for weight in weights if (record := record_of(weight)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, that of the run, and what the solver wants kept, such as a QPU's ledger."""
        solver = self.solver.state_dict()
        return super().state_dict() | {"run": dict(self.run)} | ({"solver": solver} if solver else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; nothing changes if anything in it is wrong."""
        state_dict = completed(state_dict)
        check_state(state_dict, self.param_groups)
        own = {key: value for key, value in state_dict.items() if key not in ("run", "solver")}
        if "solver" in state_dict:
            self.solver.load_state_dict(state_dict["solver"])  # first, since it may still refuse its part
        names = [group.get("param_names") for group in self.param_groups]
        super().load_state_dict(own)
        for group, known in zip(self.param_groups, names, strict=True):
            if known:  # errors name the layers of this model
                group["param_names"] = known
        self.run = dict(state_dict["run"])

    def __getstate__(self) -> dict[str, Any]:
        own = {
            name: self.__dict__[name] for name in ("solver", "on_nonfinite", "keep_grad", "per_rank", "run")
        }
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._spare = {}
        for group in self.param_groups:
            self._start_recording(group)  # a copied weight has lost its record


@contextmanager
def _without_autocast(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Full precision, also where a trainer calls ``step()`` under autocast."""
    kinds = {weight.device.type for group in groups for weight in group["params"]}
    with ExitStack() as stack:
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, evaluated with gradients although :meth:`step` runs without them."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _name(group: dict[str, Any], index: int) -> str:
    if "param_names" in group:
        return f"layer {group['param_names'][index].removesuffix('.weight')!r}"
    return f"layer {index} (weight of shape {tuple(group['params'][index].shape)})"


def missing(layers: list[Layer]) -> str:
    """Why a step cannot be taken in which no layer has a record."""
    if not layers:
        return "no weight of this optimizer trains: all have requires_grad=False"
    if any(layer.records for layer in layers):
        return f"{layers[0].name}: the record has no rows; the batch was empty"
    return (
        f"{layers[0].name}: no backward pass has left a record since the last step, on this layer or any "
        "other. Expected: weights of binary layers (binary_parameters(model)) in training mode "
        "(model.train()), used in the forward pass, and loss.backward() before step(). A weight that should "
        "not train has requires_grad=False."
    )
