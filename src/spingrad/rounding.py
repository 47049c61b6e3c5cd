"""Round a trained real network: each layer's weights become -1 or +1 times a scale per unit.

A layer with inputs ``X`` and real outputs ``T`` asks for spins ``G`` and scales ``s`` that make
``‖T - X G · s‖²`` small: the projection problem of training, with ``T / s`` in the place of the gradient. The
layers are rounded one after the other. ``X`` is what the rounded layers before it give, ``T`` is what the
real network gives, so that each layer also corrects errors of those before it.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spingrad.nn.convert import Keep, convert
from spingrad.nn.linear import BinaryLayer
from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.scaling import factor
from spingrad.sketch import chunks, grouped
from spingrad.solvers.base import Solver, derive_seed
from spingrad.solvers.block_descent import BlockDescentSolver
from spingrad.solvers.dimod import to_solver

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

ROUNDS = 3  # of spins for the scales, then scales for the spins
DAMPING = 0.01  # of the mean coupling of a spin with itself: inputs that never vary have no minimum
KINDS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d


@dataclass(frozen=True, eq=False)
class RoundedLayer:
    """How well one layer was rounded, on the calibration inputs.

    Args:
        name: Name of the layer, as in ``named_modules``.
        problems: The last problem of each group of channels; one for a linear layer.
        spins: The weights of each group, shape ``(n, m)``.
        scales: The scales for which the problems were posed, shape ``(m,)`` per group.
        outputs: Sum of squares of the real outputs, without the bias.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> _, (first, second) = round_model(model, torch.randn(100, 8))
        >>> first.name, first.spins[0].shape, first.bound() <= first.error
        ('0', torch.Size([8, 16]), True)
    """

    name: str
    problems: list[BinaryQuadratic]
    spins: list[Tensor]
    scales: list[Tensor]
    outputs: float

    @property
    def error(self) -> float:
        """Squared error of the outputs, as a fraction of their squares."""
        energies = [p.double().energy(g.double()) for p, g in zip(self.problems, self.spins, strict=True)]
        return self._share(energies)

    def bound(self, max_iterations: int = 200) -> float:
        """An error that no weights of -1 and +1 with these scales can go below.

        Args:
            max_iterations: As in :meth:`BinaryQuadratic.lower_bound`; more take longer and raise the bound.
        """
        bounds = [
            own.lower_bound(tolerance=1e-3, max_iterations=max_iterations).clamp_(min=0)
            for own in self.problems
        ]
        return self._share(bounds)

    def _share(self, energies: list[Tensor]) -> float:
        pairs = zip(energies, self.scales, strict=True)
        return float(sum((own * s.double().square()).sum() for own, s in pairs)) / max(self.outputs, 1e-300)


@torch.no_grad()
def round_model(
    model: nn.Module,
    calibration: Tensor,
    *,
    keep: Keep | Iterable[Keep] = (),
    solver: "Solver | Sampler | None" = None,
    seed: int = 0,
) -> tuple[nn.Module, list[RoundedLayer]]:
    """A copy of a trained model whose linear layers and convolutions have weights of -1 and +1.

    The copy is made by :func:`~spingrad.convert`, so it trains on with :class:`~spingrad.QPSBGD`. Biases are
    corrected so that the mean of each unit's output is that of the real network. The model itself is not
    changed.

    Args:
        model: The trained model.
        calibration: A batch of inputs, some hundreds of examples of the training set.
        keep: Layers that stay real, as in :func:`~spingrad.convert`.
        solver: Solves the problems, from the spins of :func:`babai` where it keeps starts: a solver, or any
            dimod sampler. By default 50 sweeps of :class:`~spingrad.solvers.BlockDescentSolver`.
        seed: For the solver.

    Returns:
        The rounded model, in evaluation mode, and for each layer how well it was rounded.

    Raises:
        ValueError: The model has a layer that is neither linear nor a convolution and is not kept, or one
            that the forward pass does not use exactly once.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> rounded, layers = round_model(model, torch.randn(100, 8), keep="last")
        >>> rounded[0]
        BinaryLinear(8, 16, bias=True, scale=per unit)
        >>> layers[0].bound() <= layers[0].error < 1
        True
    """
    solver = BlockDescentSolver(num_sweeps=50) if solver is None else to_solver(solver)
    real = copy.deepcopy(model).eval()
    rounded = convert(copy.deepcopy(real), keep=keep, scale="mean")
    names = [name for name, layer in rounded.named_modules() if isinstance(layer, BinaryLayer)]
    known = dict(real.named_modules())
    for name in names:
        if not isinstance(known.get(name), KINDS):
            raise ValueError(f"{name}: expected nn.Linear or a convolution; leave other layers real (keep=…)")
    targets = _outputs(real, names, calibration)
    layers = dict(rounded.named_modules())
    reports = []
    for number, (name, target) in enumerate(targets.items()):
        layer: Any = layers[name]
        x = _inputs(rounded, layer, calibration)
        reports.append(_round_layer_(name, layer, x, target, solver, derive_seed(seed, number)))
    return rounded, reports


def babai(problem: BinaryQuadratic) -> Tensor:  # (n, m)
    """Spins by Babai's nearest-plane method, which is GPTQ's rounding: a good start for a solver.

    The spins are set one after the other; each is the sign of the best real value that is left for it after
    the error of those before it. The spins with the largest inputs are set first.

    Example:
        >>> from spingrad.testing import random_problem
        >>> problem = random_problem(r=20, n=30, m=4, seed=0)
        >>> by_sign = spins_of(problem.H)
        >>> bool((problem.energy(babai(problem)) < problem.energy(by_sign)).all())
        True
    """
    double = problem.double()
    gram, H = double.gram(), double.H
    own = gram.diagonal()
    order = own.argsort()  # set from the last to the first
    damping = (DAMPING * own.mean()).clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    damped = gram[order][:, order] + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(damped)
    left = torch.linalg.solve_triangular(L, H[order], upper=False)
    spins = torch.empty_like(H)
    for i in range(len(H) - 1, -1, -1):
        own_spins = spins_of(left[i])
        spins[order[i]] = own_spins
        left[:i].addr_(L[i, :i], own_spins, alpha=-1)
    return spins.to(problem.H)


def _outputs(model: nn.Module, names: list[str], x: Tensor) -> dict[str, Tensor]:
    """What some layers give without their biases, in the order in which the forward pass uses them."""
    found: dict[str, Tensor] = {}
    layers = dict(model.named_modules())

    def note(name: str) -> Any:
        def hook(layer: Any, inputs: Any, output: Tensor) -> None:
            if name in found:
                raise ValueError(f"{name} is used twice in the forward pass: leave it real (keep={name!r})")
            bias = layer.bias
            trailing = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
            found[name] = output if bias is None else output - bias.view(-1, *[1] * trailing)

        return hook

    handles = [layers[name].register_forward_hook(note(name)) for name in names]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{missing[0]} is not used in the forward pass: leave it real (keep={missing[0]!r})")
    return found


def _inputs(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """What arrives at a layer."""
    found: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        model(x)
    finally:
        handle.remove()
    return found[0]


def _round_layer_(
    name: str, layer: BinaryLayer, x: Tensor, target: Tensor, solver: Solver, seed: int
) -> RoundedLayer:
    """Set the weights and scales of a layer."""
    assert isinstance(layer.scale, Tensor)
    parts = _least_squares(layer, layer.inputs(x), target)
    scales = layer.scale.chunk(len(parts))
    weights = layer.weight.flatten(1).chunk(len(parts))
    found = []
    for whole, scale, weight in zip(parts, scales, weights, strict=True):
        problem, spins, posed_for = _rounded(whole, scale, solver, seed)
        weight.copy_(spins.T * weight.abs())  # the latent weight keeps its size
        found.append((problem, spins, posed_for))
    if layer.bias is not None:  # the mean of the outputs is right again
        others = [dim for dim in range(target.ndim) if dim != target.ndim - 1 - layer.trailing]
        off = (target - layer(x)).mean(others) + layer.bias  # targets are without the bias
        layer.bias.add_(off)
    problems, spins_, posed = (list(own) for own in zip(*found, strict=True))
    return RoundedLayer(name, problems, spins_, posed, float(target.double().square().sum()))


def _least_squares(layer: BinaryLayer, x: Tensor, target: Tensor) -> list[BinaryQuadratic]:
    """The problem ``‖T - X G‖²`` of each group of channels, from the Gram matrix of all rows."""
    images, T = grouped(x, target, layer.groups, layer.geometry)
    output = target.shape[-layer.trailing :] if layer.geometry else ()
    n = layer.fan_in
    gram, H = x.new_zeros(len(T), n, n).double(), x.new_zeros(len(T), n, T.shape[1]).double()
    for rows, own in chunks(images, T, layer.geometry, output):
        gram += rows.mT @ rows
        H += rows.mT @ own
    squares = T.double().square().sum(2)
    parts = zip(gram, H, squares, strict=True)
    return [BinaryQuadratic.of(*(t.to(x) for t in (factor(G), h, own))) for G, h, own in parts]


def _rounded(
    whole: BinaryQuadratic, scale: Tensor, solver: Solver, seed: int
) -> tuple[BinaryQuadratic, Tensor, Tensor]:
    """Spins of a group of channels, with the problem and the scales that they answer; sets the scale."""
    H, squares = whole.H, whole.offset
    tiny = torch.finfo(H.dtype).tiny ** 0.5

    def posed() -> tuple[BinaryQuadratic, Tensor]:
        """The problem for the present scale, and that scale."""
        own = scale.clamp(min=tiny)  # a copy
        return replace(whole, H=H / own, offset=squares / own.square()), own

    problem, own = posed()
    spins = babai(problem)
    for _ in range(ROUNDS):
        spins = _solved(problem, spins, solver, seed)
        # The best scale for these spins, by least squares; one that is not positive stays as it was.
        best = (H * spins).sum(0) / (whole.Z @ spins).square().sum(0).clamp(min=tiny)
        scale.copy_(torch.where(best > 0, best, scale))
        problem, own = posed()
    return problem, spins, own


def _solved(problem: BinaryQuadratic, start: Tensor, solver: Any, seed: int) -> Tensor:
    if solver.keeps_starts:
        spins: Tensor = solver.solve(problem, initial=start, seed=seed).spins
        return spins
    found = solver.solve(problem, seed=seed)
    return torch.where(found.energy < problem.energy(start), found.spins, start)
