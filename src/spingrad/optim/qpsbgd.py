"""QP-SBGD: each layer's gradient, projected onto spins, moves its latent weights."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from spingrad.problem import BinaryLeastSquares, Rows, Target
from spingrad.record import LayerRecord, record_of, start_recording
from spingrad.scaling import idle_units
from spingrad.solvers import BlockDescentSolver, ExactSolver, Solver, derive_seed

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class QPSBGD(Optimizer):
    """Quantum projected stochastic binary-gradient descent (Krahn et al., BMVC 2024).

    For each layer with inputs ``X`` and output gradient ``V``, one step is

        ``G = argmin over G ∈ {-1,+1} of ‖V - Z G‖²``  and  ``Ω ← clamp(Ω - lr · G)``,

    where ``Z`` and the target are scaled as :func:`~spingrad.problem.jacobian` and
    :func:`~spingrad.scaling.reachable_target` say. All layers go to the solver together.

    Made for the weights of binary layers alone: ``binary_parameters(model)``; others belong to an ordinary
    torch optimizer. From here on the layers record for this one and leave ``weight.grad`` empty.

    Args:
        params: Latent weights, with names (``binary_parameters(model)``), without, or in groups.
        lr: Learning rate, the distance that every latent weight moves in a step.
        solver: Solves the projection. Default: ``BlockDescentSolver()``.
        target_rms: Root mean square of each unit's target, in units of what its spins can reach; ``"auto"``
            goes by how much the rows of the batch have in common. Small values trust the quadratic model,
            large ones tend to signSGD, ``None`` is the paper.
        momentum: Weight of the past in the linear term ``ZᵀV``; the quadratic term is that of the batch.
        rank: With momentum, how many directions of the inputs the quadratic term keeps; ``None`` for all.
        rows: ``"uniform"``, or ``"normalized"`` as in the paper.
        clamp: Largest magnitude of a latent weight; ``None`` for no limit.
        seed: Seed of the run. The solver's seeds follow from it, the step and the layer.
        on_nonfinite: ``"raise"`` an error that names the layer, or ``"skip"`` the whole step.
        keep_grad: Let the layers compute ``weight.grad`` too, for monitoring.

    Note:
        Beyond the publication, targets are brought into reach, the linear term remembers, the quadratic one
        keeps what leads, rows weigh the same, rows and units without a gradient rest, and latent weights are
        clamped. :meth:`as_published` takes all of it back.

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
        solver: Solver | None = None,
        target_rms: Target = "auto",
        momentum: float = 0.9,
        rank: int | None = 8,
        rows: Rows = "uniform",
        clamp: float | None = 1.0,
        seed: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        keep_grad: bool = False,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr is at least 0, got {lr}")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite is "raise" or "skip", got {on_nonfinite!r}')
        self.solver = BlockDescentSolver() if solver is None else solver
        self.on_nonfinite = on_nonfinite
        self.keep_grad = keep_grad
        defaults = dict(lr=lr, target_rms=target_rms, momentum=momentum, rank=rank, rows=rows, clamp=clamp)
        super().__init__(params, {**defaults, "seed": seed, "step": 0, "skipped": 0})

    @classmethod
    def as_published(cls, params: Params, lr: float, solver: Solver | None = None) -> "QPSBGD":
        """The paper to the letter: its rows, its target, no clamp, and the problem solved exactly.

        The paper's layers have ``scale=False``. Layers of more than about 60 inputs need another ``solver``.
        """
        solver = ExactSolver() if solver is None else solver
        paper: dict[str, Any] = dict(target_rms=None, momentum=0.0, rank=None, rows="normalized", clamp=None)
        return cls(params, lr, solver=solver, **paper)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "seed" in param_group:
            raise ValueError("seed belongs to the run: pass it to QPSBGD, not to a group of parameters")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["target_rms"] not in (None, "auto") and not group["target_rms"] > 0:
            raise ValueError(f'target_rms is positive, "auto" or None, got {group["target_rms"]}')
        if group["rank"] is not None and group["rank"] < 1:
            raise ValueError(f"rank is at least 1 or None, got {group['rank']}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum is in [0, 1), got {group['momentum']}")
        if group["rows"] not in ("uniform", "normalized"):
            raise ValueError(f'rows is "uniform" or "normalized", got {group["rows"]!r}')
        for weight in group["params"]:
            start_recording(weight, self.keep_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the records of all weights."""
        super().zero_grad(set_to_none)
        self._forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Project every layer's gradient onto spins and move its weights; consumes the records.

        A step that raises moved nothing and can be taken again (unless the default solver ran out of memory).
        """
        loss = evaluate(closure)
        layers = self._layers()
        first = self.param_groups[0]
        if self._finite(layers):
            posed = [self._pose(layer) for layer in layers]
            problems = [problem for own, _, _ in posed for problem in own]
            seed = derive_seed(first["seed"], first["step"])
            streams = iter(self.solver.stream(problems, seed=seed))
            for layer, (own, idle, average) in zip(layers, posed, strict=True):
                rows = layer.weight.flatten(1)  # (m, n)
                for part, resting in zip(rows.chunk(len(own)), idle, strict=True):
                    _move(part, resting, next(streams), layer.group)
                if rows.data_ptr() != layer.weight.data_ptr():  # channels last: the rows were a copy
                    layer.weight.copy_(rows.view_as(layer.weight))
                if average is not None:
                    state = self.state[layer.weight]
                    state.update(average=average, steps=state.get("steps", 0) + 1)
        else:
            first["skipped"] += 1
        first["step"] += 1
        self._forget()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with what the solver wants kept, such as a QPU's ledger."""
        return super().state_dict() | ({"solver": own} if (own := self.solver.state_dict()) else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "solver"})
        if "solver" in state_dict:
            self.solver.load_state_dict(state_dict["solver"])

    def _layers(self) -> list["_Layer"]:
        layers = self._recorded()
        for layer in layers:
            if not layer.records or not len(layer.records[0].x):
                raise RuntimeError(_missing(layer.name, empty=bool(layer.records)))
        return layers

    def _recorded(self) -> list["_Layer"]:
        """Every weight that trains, with its records, if it has any."""
        layers = []
        for group in self.param_groups:
            for i, weight in enumerate(group["params"]):
                if weight.requires_grad:
                    records = record.layers() if (record := record_of(weight)) is not None else []
                    layers.append(_Layer(_name(group, i), group, weight, records))
        return layers

    def _finite(self, layers: list["_Layer"]) -> bool:
        for layer in layers:
            if not all(record.is_finite() for record in layer.records):
                if self.on_nonfinite == "skip":
                    return False
                raise FloatingPointError(
                    f"{layer.name}: the layer's input or output gradient is not finite; look for an overflow "
                    'in the loss or a lower layer, or pass on_nonfinite="skip"'
                )
        return True

    def _pose(self, layer: "_Layer") -> tuple[list[BinaryLeastSquares], list[Tensor | None], Tensor | None]:
        """The problems of a layer, their units that rest, and the average of their linear terms."""
        rows, target_rms, momentum, rank = (
            layer.group[k] for k in ("rows", "target_rms", "momentum", "rank")
        )
        problems = [BinaryLeastSquares.from_record(r, rows, target_rms) for r in layer.records]
        idle = [None if target_rms is None else idle_units(problem.V) for problem in problems]
        if not momentum:
            return problems, idle, None
        state = self.state[layer.weight]
        fields = [problem.fields().T for problem in problems]  # (m, n) each
        if state:
            weight = (1 - momentum) / (1 - momentum ** (state["steps"] + 1))  # no bias to a zero at the start
            past = state["average"].chunk(len(problems))
            fields = [now.lerp_(old.to(now), 1 - weight) for now, old in zip(fields, past, strict=True)]
        problems = [p.driven_by(h.T, rank) for p, h in zip(problems, fields, strict=True)]
        return problems, idle, fields[0] if len(fields) == 1 else torch.cat(fields)

    def _forget(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if (record := record_of(weight)) is not None:
                    record.clear()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("solver", "on_nonfinite", "keep_grad")}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("rank", None)  # a checkpoint from before there were ranks goes on as it was
            for weight in group["params"]:  # a copied weight has lost its record
                start_recording(weight, self.keep_grad)


class _Layer(NamedTuple):
    name: str
    group: dict[str, Any]
    weight: Tensor
    records: list[LayerRecord]  # one for each group of channels


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, which needs gradients, inside a step, which has none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _move(weight: Tensor, idle: Tensor | None, blocks: Iterable[Tensor], group: dict[str, Any]) -> None:
    """``Ω ← clamp(Ω - lr · G)``, some units after the other, as the solver gives them; idle ones rest."""
    lr, clamp, start = float(group["lr"]), group["clamp"], 0
    kept = None if idle is None else weight[idle]
    for spins in blocks:
        part = weight[start : start + len(spins)].add_(spins, alpha=-lr)
        if clamp is not None:
            part.clamp_(-clamp, clamp)
        start += len(spins)
    if idle is not None and kept is not None:
        weight[idle] = kept


def _name(group: dict[str, Any], index: int) -> str:
    if "param_names" in group:
        return f"layer {group['param_names'][index].removesuffix('.weight')!r}"
    return f"layer {index} (weight of shape {tuple(group['params'][index].shape)})"


def _missing(name: str, empty: bool) -> str:
    if empty:
        return f"{name}: the record has no rows; the batch was empty"
    return (
        f"{name}: no backward pass has left a record since the last step. Expected: the weight of a binary "
        "layer (binary_parameters(model)) in training mode (model.train()), used in the forward pass, and "
        "loss.backward() before step(). A weight that should rest has requires_grad=False."
    )
