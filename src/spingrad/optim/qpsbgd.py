"""QP-SBGD: each layer's gradient, projected onto spins, moves its latent weights."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import AdamW, Optimizer

from spingrad._memory import Pool
from spingrad._numbers import check_whole
from spingrad.kernels import sample as _sample  # noqa: F401, an operator that is registered
from spingrad.kernels.passes import blended, lengths, move_
from spingrad.optim import functional
from spingrad.optim.checks import (
    INPUTS_OUT_OF_RANGE,
    LABELS,
    NOT_TIED,
    WITHOUT_SKETCH,
    check_added,
    check_dtype,
    check_finite,
    check_settings,
    check_sharded,
    check_state,
    check_weight,
    to_plain,
)
from spingrad.optim.gradient import Gradient, Scaled, is_sharded, like, local, shard_of
from spingrad.optim.ranks import Alone, Answer, Voting, ranks_of
from spingrad.problem import BinaryQuadratic
from spingrad.scaling import TargetRms, size_of
from spingrad.sketch import Companion, Kind
from spingrad.solvers.base import Solver, derive_seed
from spingrad.solvers.block_descent import BlockDescentSolver
from spingrad.solvers.dimod import to_solver
from spingrad.solvers.exact import ExactSolver

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

    from spingrad.distributed.wire import Wire

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Weighting = Literal["uniform", "normalized"]


class QPSBGD(Optimizer):
    """Quantum projected stochastic binary-gradient descent (Krahn et al., BMVC 2024).

    For each layer with inputs ``X`` one step is

        ``G = argmin over G ∈ {-1,+1} of ‖Z G‖² - 2⟨H, G⟩``  and  ``Ω ← clamp(Ω - lr · G)``,

    where ``Z`` are leading directions of the inputs and ``H`` is a running average of ``weight.grad``, which
    is given a length of its own. The functions of :mod:`spingrad.optim.functional` compute it. All layers go
    to the solver together.

    It takes the weights of binary layers, ``binary_parameters(model)``. Other parameters belong to an
    ordinary torch optimizer, or to a group with ``"real": True``, which moves as by ``torch.optim.AdamW`` and
    takes its settings: then one optimizer trains a whole model.

    While it lives, backward passes leave a sketch of its layers' inputs beside ``weight.grad``
    (:mod:`spingrad.sketch`), which ``step()`` uses up. What multiplies a gradient by a number above zero (a
    loss scale, clipping, an average) changes no step; whatever else changes it is part of it.

    Under ``DistributedDataParallel`` and ``fully_shard`` a rank is a pass: the engine averages gradients, the
    optimizer adds sketches and shares out the solving, and the step is that of one process which accumulates
    the parts of all ranks.

    Args:
        params: Latent weights, with names (``binary_parameters(model)``), without, or in groups.
        lr: Learning rate, the distance that every latent weight moves in a step.
        solver: Solves the projection: a solver, or any dimod sampler. Default: ``BlockDescentSolver()``.
        target_rms: Root mean square of each unit's target, in units of what its spins can reach; ``"auto"``
            chooses it by how many rows of the batch share their inputs. Small values trust the quadratic
            model, large ones approach signSGD, ``None`` takes the gradient as it is, like the paper.
        momentum: Weight of the past in the linear term; the quadratic term is that of the batch.
        whitening: How much weaker the linear term becomes in directions which the units of a layer share, as
            in :func:`~spingrad.scaling.whitened`. 1 can raise the accuracy of networks with hardtanh, and
            lowers it with sign activations. A step takes longer.
        rank: How many leading directions of the inputs the quadratic term keeps, of at most 128 rows;
            ``None`` for all directions of all rows, whose Gram matrix backward passes then leave.
        rows: ``"uniform"``, or ``"normalized"`` as in the paper.
        clamp: Largest magnitude of a latent weight; ``None`` for no limit.
        seed: Seed of the run. The solver's seeds follow from it, the step and the layer.
        on_nonfinite: ``"raise"`` an error that names the layer, or ``"skip"`` the whole step.
        ranks: What the ranks of a process group do: ``"together"`` they train one model whose gradients
            DistributedDataParallel or ``fully_shard`` averages; by ``"vote"`` each solves the problem of its
            own rows, and every weight moves the way of the majority, which takes one bit per weight and rank
            in each direction; ``"apart"`` each trains a model of its own.
        group: The process group; ``None`` is all ranks.

    Attributes:
        run: State of the whole run, which ``state_dict()`` has in each of its groups: its
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

        A whole model:

        >>> from spingrad import real_parameters
        >>> model = torch.nn.Sequential(BinaryLinear(4, 3), torch.nn.BatchNorm1d(3))
        >>> real = {"params": real_parameters(model), "real": True, "lr": 1e-3}
        >>> optimizer = QPSBGD([{"params": binary_parameters(model)}, real], lr=3e-3)
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
        rank: int | None = 16,
        rows: Weighting = "uniform",
        clamp: float | None = 1.0,
        seed: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        ranks: Literal["together", "vote", "apart"] = "together",
        group: "dist.ProcessGroup | Wire | None" = None,
    ) -> None:
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite is "raise" or "skip", got {on_nonfinite!r}')
        self.solver = BlockDescentSolver() if solver is None else to_solver(solver)
        self.on_nonfinite = on_nonfinite
        self.ranks, self._group = ranks, group
        self._ranks = ranks_of(ranks, group)
        self._ready = False
        try:
            check_whole("seed", seed, 0)
            self.run = {"seed": index(seed), "step": 0, "skipped": 0}
            self._pool = Pool()  # memory of linear terms
            self._adamw = AdamW([torch.zeros(())])
            settings = dict(lr=lr, target_rms=target_rms, momentum=momentum, whitening=whitening)
            super().__init__(params, to_plain(settings | dict(rank=rank, rows=rows, clamp=clamp)))
        except Exception as error:
            self._ranks.refuse(error)
            raise
        self._ready = True
        self._ranks.begin(self, [weight for own in self.binary_groups for weight in own["params"]])

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
        if param_group.get("real"):
            self._add_real(param_group)
            return
        check_added(param_group)
        super().add_param_group(to_plain(param_group))
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for i, weight in enumerate(group["params"]):
                check_weight(_name(group, i), weight)
                if companion_of(weight) is None:
                    raise ValueError(f"{_name(group, i)}: {NOT_TIED}")
                if is_sharded(weight):
                    check_sharded(_name(group, i), weight, group, self.ranks)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._begin(group)
        if self._ready:  # the constructor begins with all groups together
            self._ranks.begin(self, group["params"])

    def _add_real(self, param_group: dict[str, Any]) -> None:
        own = {name: value for name, value in param_group.items() if name not in {"params", "real", *LABELS}}
        if unknown := sorted(set(own) - set(self._adamw.defaults)):
            raise ValueError(f"{unknown[0]!r} is no setting of AdamW, which moves a group of real parameters")
        known = AdamW([torch.zeros(())], **own).defaults  # which checks them
        super().add_param_group(to_plain(known | param_group))
        group = self.param_groups[-1]
        for name in set(self.defaults) - set(known):  # torch fills in those of binary weights
            del group[name]
        for i, weight in enumerate(group["params"]):
            if companion_of(weight) is not None:
                self.param_groups.pop()
                raise ValueError(f"{_name(group, i)}: a binary weight is in a group of real parameters")

    @property
    def binary_groups(self) -> list[dict[str, Any]]:
        """The groups of binary weights."""
        return [group for group in self.param_groups if not group.get("real")]

    def _begin(self, group: dict[str, Any]) -> None:
        """Its layers leave sketches as long as this optimizer lives."""
        companions = []
        for weight in group["params"]:
            if (companion := companion_of(weight)) is None:
                continue  # a copy of an optimizer without its model
            weight.__dict__.pop("relaxed", None)
            companion.begin(kind_of(group), weight)
            companions.append((companion, companion.leaf))
        weakref.finalize(self, _end, companions).atexit = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Project every layer's gradient onto spins and move its weights; uses up the sketches.

        A step that raises has moved nothing and can be taken again. Without any gradient nothing happens, as
        in torch's optimizers.
        """
        if type(self._ranks) is Alone:  # the process group may be younger than the optimizer
            self._ranks = ranks_of(self.ranks, self._group)
        loss = evaluate(closure)
        with _without_autocast(self.param_groups):
            self._step()
        return loss

    @_disable_dynamo  # a compiled training step calls it as it is
    def _step(self) -> None:
        if self._project():
            self._move_real()

    def _move_real(self) -> None:
        if groups := [group for group in self.param_groups if group.get("real")]:
            self._adamw.param_groups, self._adamw.state = groups, self.state
            self._adamw.step()

    def _project(self) -> bool:
        """The step of the binary weights; whether it was not skipped."""
        gradients = self._ranks.gradients(self)
        if not gradients:
            return True
        if accepted := self._ranks.accept(self, gradients):
            if all(own.sketch is None for own in gradients):
                return True  # zeros, from which torch.distributed.checkpoint makes a state
            seed = derive_seed(self.run["seed"], self.run["step"])
            for own, answer in zip(*self._ranks.solve(self, gradients, seed), strict=True):
                self._move(own, answer)
        else:
            self.run["skipped"] += 1
        self.run["step"] += 1
        self._clear()
        return accepted

    def gradients(self) -> list[Gradient]:
        """The weights that have a gradient, with what backward passes have left for them.

        A weight without one stays as it is, as in torch's optimizers.
        """
        found = []
        for group in self.binary_groups:
            check_settings(group)  # a scheduler may have changed them
            for i, weight in enumerate(group["params"]):
                name = _name(group, i)
                check_dtype(name, weight)  # a model can change its dtype at any time
                companion = companion_of(weight)
                sketch = None if companion is None else companion.sketch
                if companion is not None and companion.kind != kind_of(group):
                    raise RuntimeError(
                        f"{name}: rank or rows was changed to a kind of step that needs other sketches; make "
                        "a new optimizer with these settings (it can load this one's state_dict())"
                    )
                if weight.grad is None:
                    if sketch is not None and companion is not None and not companion.holds(weight):
                        raise RuntimeError(
                            f"{name}: the model has another weight in its place, as after "
                            "load_state_dict(assign=True); make the optimizer after that"
                        )
                    continue
                grad = local(weight.grad).flatten(1).to(weight.dtype)
                first, _ = shard_of(weight)
                found.append(Gradient(name, weight, group, grad, sketch, lengths(grad), first))
        return found

    def accept(self, gradients: list[Gradient]) -> bool:
        """Whether all gradients are finite; if not, the step is skipped or an error names the layer.

        A latent weight that is not finite is an error in any case (its layer's outputs are not finite, and so
        is its gradient), and so is a gradient without a sketch. One tensor is read back for all together.
        """
        numbers = torch.stack([_facts(own) for own in gradients]).tolist()
        bad = []
        for own, (total, count, sketch) in zip(gradients, numbers, strict=True):
            if not math.isfinite(total):
                check_finite(own.name, own.weight)
                bad.append(own.name)
            elif total > 0 and not count > 0:
                raise RuntimeError(f"{own.name}: {WITHOUT_SKETCH}")
            elif not math.isfinite(sketch):
                raise FloatingPointError(f"{own.name}: {INPUTS_OUT_OF_RANGE}")
        if bad and self.on_nonfinite == "raise":
            raise FloatingPointError(
                f"{bad[0]}: the gradient is not finite; look for an overflow in the loss or a lower layer, "
                'or pass on_nonfinite="skip"'
            )
        return not bad

    def scale(self, gradient: Gradient) -> Scaled:
        """The rows of a gradient's problem and the size of its linear term."""
        group, grad = gradient.group, gradient.grad
        kind, rank, target_rms = kind_of(group), group["rank"], group["target_rms"]
        units, end = len(gradient.length), gradient.first + len(grad)
        if (sketch := gradient.sketch) is None:  # of a gradient of zeros
            sketch, kind = grad.new_zeros(1, 2, grad.shape[1]), "rows"
        quadratic = functional.scale(sketch, kind, units, rank, target_rms)
        length = gradient.length
        if kind == "published":
            linear, factors = functional.published(sketch, grad)
            quadratic = quadratic._replace(offset=quadratic.offset * factors.square()[:, None])
            grad, length = linear.to(grad), lengths(linear)
        quadratic = functional.Quadratic(*(own.to(grad.dtype) for own in quadratic))
        reach = quadratic.reach.repeat_interleave(units // len(quadratic.Z))
        size = reach if target_rms is None else size_of(length, reach.double()).to(grad.dtype)
        return Scaled(gradient, quadratic, grad, size[gradient.first : end])

    def pose(self, scaled: Scaled) -> list[BinaryQuadratic]:
        """The problems of one weight's step, one per group of channels. Override it to try another step."""
        group, quadratic = scaled.gradient.group, scaled.quadratic
        idle = scaled.size == 0
        if group["target_rms"] is None:  # as published, every unit moves
            idle = (scaled.gradient.length == 0).all().expand_as(idle)
        if group["momentum"]:
            quadratic = quadratic._replace(offset=torch.zeros_like(quadratic.offset))
        rows, columns = scaled.linear.shape
        H = self._pool.empty(rows, columns, scaled.linear)
        H = self._averaged(scaled, ahead=H)
        return functional.pose(quadratic, H, idle, group["whitening"], scaled.gradient.first)

    def _averaged(self, scaled: Scaled, ahead: Tensor | None = None) -> Tensor:  # (m, n)
        """The running average of the linear term after this step, written in place of that before it.

        With ``ahead``, memory for the result, Nesterov's look ahead of it; the average stays as it is.
        """
        gradient, linear, size = scaled.gradient, scaled.linear, scaled.size
        momentum, state = float(gradient.group["momentum"]), self.state.get(gradient.weight, {})
        if not momentum or "exp_avg" not in state:
            return torch.mul(linear, size[:, None], out=ahead)
        past = local(state["exp_avg"]).flatten(1).to(linear)
        new = functional.weight_of(momentum, state["step"])
        if ahead is None:
            return blended(past, linear, 1 - new, new * size, past)
        return blended(past, linear, momentum * (1 - new), (1 - momentum * (1 - new)) * size, ahead)

    def _move(self, scaled: Scaled, answer: Answer) -> None:
        group, weight = scaled.gradient.group, scaled.gradient.weight
        spins, idle = answer
        own = local(weight)
        rows = own.flatten(1)  # (m, n)
        move_(rows, spins, idle, float(group["lr"]), group["clamp"])
        if rows.data_ptr() != own.data_ptr():  # channels last: the rows were a copy
            own.copy_(rows.view_as(own))
        torch.autograd.graph.increment_version(weight)  # graphs of before the step must not be used again
        if group["momentum"]:
            average, state = self._averaged(scaled), self.state[weight]
            if "exp_avg" not in state or local(state["exp_avg"]).data_ptr() != average.data_ptr():
                state["exp_avg"] = like(average, weight)
            state["step"] = state.get("step", 0) + 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the sketches of all weights."""
        super().zero_grad(set_to_none)
        self._clear()

    def _clear(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if (companion := companion_of(weight)) is not None:
                    companion.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, that of the run, and what the solver wants kept, such as a QPU's ledger."""
        state = super().state_dict()
        others = {"solver": self.solver.state_dict(), "ranks": self._ranks.state_dict()}
        for group in state["param_groups"]:
            group["run"] = dict(self.run)  # torch.distributed.checkpoint keeps groups and states alone
        return state | {name: own for name, own in others.items() if own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; nothing changes if anything in it is wrong."""
        check_state(state_dict, self.param_groups)
        groups = [dict(group) for group in state_dict["param_groups"]]
        runs = [group.pop("run") for group in groups]
        own = {"state": state_dict["state"], "param_groups": groups}
        if "solver" in state_dict:
            self.solver.load_state_dict(state_dict["solver"])  # first, since it may still refuse its part
        if "ranks" in state_dict:
            self._ranks.load_state_dict(state_dict["ranks"])
        names = [group.get("param_names") for group in self.param_groups]
        super().load_state_dict(own)
        for group, known in zip(self.param_groups, names, strict=True):
            if known:  # errors name the layers of this model
                group["param_names"] = known
            tied = [companion_of(weight) for weight in group["params"]]
            if any(companion is not None and companion.kind != kind_of(group) for companion in tied):
                self._begin(group)
        self.run = dict(runs[0])
        self._ranks.loaded = True

    def check(self) -> None:
        """Compare settings and weights of all ranks now: for the end of a run. All ranks call it together.

        Weights are compared in the first step, in every hundredth, and in the first after loading a state.

        Raises:
            RuntimeError: They differ; the message names ranks and weights.
        """
        self._ranks.check(self)

    @property
    def suspects(self) -> list[int]:
        """Ranks whose votes look inverted or random (:mod:`spingrad.distributed.agreement`)."""
        return self._ranks.vote.agreement.suspects() if isinstance(self._ranks, Voting) else []

    @property
    def device(self) -> torch.device:
        """Of the first weight."""
        own: torch.device = self.binary_groups[0]["params"][0].device
        return own

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("solver", "on_nonfinite", "ranks", "run")}
        companions = [[companion_of(weight) for weight in group["params"]] for group in self.param_groups]
        return super().__getstate__() | own | {"companions": companions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        companions = state.pop("companions", None)  # a copied Parameter has lost it
        super().__setstate__(state)
        if companions is None:
            return  # load_state_dict
        self._pool, self._ready, self._group, self._ranks = Pool(), True, None, Alone()
        self._adamw = AdamW([torch.zeros(())])
        for group, known in zip(self.param_groups, companions, strict=True):
            for weight, companion in zip(group["params"], known, strict=True):
                if companion is not None:
                    weight.companion = companion
            self._begin(group)


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


def companion_of(weight: Tensor) -> Companion | None:
    """What ties a weight to its layers, if ``binary_parameters(model)`` has listed it."""
    return getattr(weight, "companion", None)


def kind_of(group: dict[str, Any]) -> Kind:
    """What backward passes have to leave for these settings."""
    if group["rows"] == "normalized":
        return "published"
    return "gram" if group["rank"] is None else "rows"


def _facts(gradient: Gradient) -> Tensor:  # (3,)
    """The sum of the lengths, the number of rows with a gradient, and the largest entry of the sketch."""
    total, sketch = gradient.length.sum(), gradient.sketch
    if sketch is None:
        return torch.stack([total, total * 0, total * 0])
    low, high = torch.aminmax(sketch)
    return torch.stack([total, sketch[:, -1, 0].amax().double(), torch.maximum(-low, high).double()])


def _end(companions: list[tuple[Companion, Tensor | None]]) -> None:
    """No more sketches for an optimizer that is gone, unless another one has taken its place."""
    for companion, leaf in companions:
        if companion.leaf is leaf:
            companion.end()
