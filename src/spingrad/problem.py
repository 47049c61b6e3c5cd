"""The projection problem: which spins best reproduce a layer's gradient?"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from spingrad.bounds import lower_bound
from spingrad.record import LayerRecord
from spingrad.rows import Patches
from spingrad.scaling import leading, live_rows, reachable_target, sampled, suitable_target

if TYPE_CHECKING:
    import dimod

Rows = Literal["uniform", "normalized"]
Target = float | Literal["auto"] | None
_Inputs = TypeVar("_Inputs", Tensor, Patches)


@dataclass(frozen=True)
class BinaryLeastSquares:
    """Spins ``G`` in {-1, +1} that minimize ``‖V - Z G‖² - 2⟨H, G⟩``, each column on its own.

    The columns are the units of a layer. They share the coupling matrix ``ZᵀZ``, whose rank is at most
    ``r``, so ``Z`` is kept and the matrix is formed only for annealers that ask for it.

    Args:
        Z: Normalized Jacobian of the layer, shape ``(r, n)``.
        V: Target at the layer's output, shape ``(r, m)``.
        offset: A constant of each column's energy, as left over by :meth:`compressed`.
        H: Fields on the spins beside those of the target, shape ``(n, m)``: what momentum remembers.

    Example:
        >>> problem = BinaryLeastSquares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> problem.energy(torch.tensor([[1.0], [-1.0]]))
        tensor([4.2500])
    """

    Z: Tensor
    V: Tensor
    offset: Tensor | float = 0.0
    H: Tensor | None = None

    def __post_init__(self) -> None:
        if self.Z.ndim != 2 or self.V.ndim != 2 or len(self.Z) != len(self.V):
            raise ValueError(
                "Z and V are matrices with equally many rows, "
                f"got shapes {tuple(self.Z.shape)} and {tuple(self.V.shape)}"
            )

    @staticmethod
    def from_record(
        record: LayerRecord, rows: Rows = "uniform", target_rms: Target = None
    ) -> "BinaryLeastSquares":
        """The problem of one layer's step; see :func:`jacobian` and :mod:`spingrad.scaling`."""
        x, grad = live_rows(record.x, record.grad) if rows == "uniform" else (record.x, record.grad)
        if isinstance(x, Patches) and rows == "uniform":
            problem: BinaryLeastSquares = PatchLeastSquares(_uniform(x), grad)
            if target_rms not in (None, "auto"):  # noise to n inputs, of which they reach but √(n/r)
                target_rms *= max(1.0, len(grad) / x.shape[1]) ** 0.5
        else:
            problem = BinaryLeastSquares(jacobian(x if isinstance(x, Tensor) else x.dense(), rows), grad)
        scale = suitable_target(problem.sampled[1], len(grad)) if target_rms == "auto" else target_rms
        return problem._with(V=reachable_target(grad, scale))

    @property
    def shape(self) -> tuple[int, int]:  # (r, n)
        return self.Z.shape[0], self.Z.shape[1]

    @property
    def num_spins(self) -> int:
        return self.shape[1]

    @property
    def num_units(self) -> int:
        return self.V.shape[1]

    def blocks(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Blocks of about ``size`` inputs: which, and their ``Z`` and ``Hᵀ``, ``(r, b)`` and ``(m, b)``."""
        start = 0
        for z in self._columns(size):
            own = slice(start, start := start + z.shape[1])
            yield own, z, None if self.H is None else self.H[own].T

    def _columns(self, size: int) -> Iterator[Tensor]:
        yield from self.Z.split(size, dim=1)

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:  # Z and V, by rows
        yield self.Z, self.V

    @cached_property
    def sampled(self) -> tuple[Tensor, Tensor]:
        """Some rows of ``Z`` that stand for all, and their products."""
        return sampled(self.patches if isinstance(self, PatchLeastSquares) else self.Z)

    def energy(self, G: Tensor) -> Tensor:  # (n, m) -> (m,)
        energy = (self.V - self.Z @ G).square().sum(0) + self.offset
        return energy if self.H is None else energy - 2 * (self.H * G).sum(0)

    def fields(self) -> Tensor:  # (n, m)
        """``ZᵀV + H``, half the negative gradient of the energy at ``G = 0``."""
        fields = self._pulled_back().T  # in the memory layout of a weight
        return fields if self.H is None else fields + self.H

    def _pulled_back(self) -> Tensor:  # (m, n)
        return self.V.T @ self.Z

    def driven_by(self, H: Tensor, rank: int | None = None) -> "BinaryLeastSquares":
        """``‖Z G‖² - 2⟨H, G⟩``: the same couplings, or the ``rank`` leading ones, and ``H`` alone."""
        nothing = self.V.new_zeros(())
        if rank is None:
            return self._with(V=nothing.expand_as(self.V), offset=0.0, H=H)
        Z = leading(*self.sampled, rank)
        return BinaryLeastSquares(Z, nothing.expand(len(Z), self.num_units), H=H)

    def units(self, count: int) -> Iterator["BinaryLeastSquares"]:
        """The same problem in parts of ``count`` units."""
        for start in range(0, self.num_units, count):
            own = slice(start, start + count)
            offset = self.offset[own] if isinstance(self.offset, Tensor) else self.offset
            H = None if self.H is None else self.H[:, own]
            yield self._with(V=self.V[:, own], offset=offset, H=H)

    def _with(self, **fields: Tensor | float | None) -> "BinaryLeastSquares":
        changed = copy(self)
        changed.__dict__.update(fields)
        return changed

    def double(self) -> "BinaryLeastSquares":
        offset = self.offset.double() if isinstance(self.offset, Tensor) else self.offset
        H = None if self.H is None else self.H.double()
        return BinaryLeastSquares(self.Z.double(), self.V.double(), offset, H)

    def compressed(self) -> "BinaryLeastSquares":
        """An equal problem with at most ``n`` rows: ``(Z, V)`` becomes ``(R, QᵀV)`` with ``Z = Q R``.

        Energies stay what they were. (A Cholesky factor of ``ZᵀZ`` would be cheaper, but the patches of
        a convolution are nearly dependent and it fails in single precision.)
        """
        if self.shape[0] <= self.num_spins:
            return self
        R, V = self.V.new_zeros(0, self.num_spins), self.V.new_zeros(0, self.num_units)
        for z, v in self._chunks():
            Q, R = torch.linalg.qr(torch.cat([R, z]))
            V = Q.T @ torch.cat([V, v])
        lost = self.V.square().sum(0, dtype=torch.float64) - V.square().sum(0, dtype=torch.float64)
        return BinaryLeastSquares(R, V, self.offset + lost.clamp_(min=0).to(V.dtype), self.H)

    def to_ising(self, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Biases ``h``, upper-triangular couplings ``J`` and offset of one unit."""
        gram, v = self.Z.T @ self.Z, self.V[:, unit]
        h = -2 * (self.Z.T @ v if self.H is None else self.Z.T @ v + self.H[:, unit])
        J = 2 * gram.triu(1)
        offset = gram.trace() + v @ v  # g² = 1 turns the diagonal into a constant
        own = self.offset[unit] if isinstance(self.offset, Tensor) else self.offset
        return h, J, offset + own

    def to_bqm(self, unit: int) -> "dimod.BinaryQuadraticModel":
        """One unit as a dimod model over the spin variables ``0 … n-1``, in double precision."""
        import dimod

        h, J, offset = (t.cpu().numpy() for t in self.double().to_ising(unit))
        return dimod.BinaryQuadraticModel(h, J, float(offset), dimod.SPIN)

    def lower_bound(self, *, tolerance: float = 1e-6, max_iterations: int = 2000) -> Tensor:  # (m,)
        """An energy that no spins of each unit can go below, as :mod:`spingrad.bounds` explains."""
        problem, small = self.double(), self.double().compressed()
        whole, part = (problem.Z, problem.V, problem.H), (small.Z, small.V, small.H)
        return lower_bound(whole, part, tolerance, max_iterations) + problem.offset


class PatchLeastSquares(BinaryLeastSquares):
    """The problem of a convolution: ``Z`` is unfolded in parts, and whole only for who asks for it."""

    patches: Patches

    def __init__(self, patches: Patches, V: Tensor) -> None:
        self.__dict__.update(patches=patches, V=V, offset=0.0, H=None)

    @cached_property
    def Z(self) -> Tensor:
        return self.patches.dense()

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.V), self.patches.shape[1]

    def _pulled_back(self) -> Tensor:
        return self.patches.pulled_back(self.V)

    def _columns(self, size: int) -> Iterator[Tensor]:
        return self.patches.blocks(min(size, 256))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for z in self.patches.chunks(max(2 * self.num_spins, 2**24 // self.num_spins)):
            yield z, self.V[start : start + len(z)]
            start += len(z)


def jacobian(x: Tensor, rows: Rows) -> Tensor:  # (r, n) -> (r, n)
    """Scale the inputs to the ``Z`` of the problem.

    ``"uniform"`` divides all rows by ``√(n · mean ‖x‖²)``: they weigh the same, as a quadratic model of
    the loss asks, and spins reach ``|z · g| ≤ 1`` at a row of mean norm in any unit of the inputs.
    ``"normalized"`` is the paper's ``x_b / ‖x_b‖²``, which lets the shortest rows speak loudest.
    """
    if rows == "normalized":
        return x / x.square().sum(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
    if rows == "uniform":
        return _uniform(x)
    raise ValueError(f'rows is "uniform" or "normalized", got {rows!r}')


def _uniform(x: _Inputs) -> _Inputs:
    norm = x.norm() * (x.shape[1] / max(len(x), 1)) ** 0.5
    return x / norm if norm > 0 else x
