"""The projection problem: which spins best reproduce a layer's gradient?"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spingrad._files import write_atomically
from spingrad._numbers import check_whole
from spingrad._tensors import Form, Format
from spingrad._version import __version__
from spingrad.bounds import box_bound, box_minimum

if TYPE_CHECKING:
    import dimod


MOST_COUPLINGS = 50_000_000  # of a dimod model: some gigabytes
FORMAT = Format(
    key="spingrad problem",
    version=1,
    content="origin",
    what="a problem",
    hint="Problems are written by problem.save(path): write it again",
    most=2**32,
)


class ProblemFileError(ValueError):
    """A file that is not a problem, or was changed since it was written; the message says why.

    Example:
        >>> BinaryQuadratic.load(__file__)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        spingrad.problem.ProblemFileError: ... is not a problem of spingrad: expected a safetensors file ...
    """


@dataclass(frozen=True, eq=False)
class BinaryQuadratic:
    """Spins ``G`` in {-1, +1} that minimize ``‖Z G‖² - 2⟨H, G⟩ + offset``, each column on its own.

    The columns are the units of a layer. They share the coupling matrix ``ZᵀZ``, whose rank is at most the
    number of rows, so ``Z`` is kept and the matrix is formed only for annealers that ask for it.

    Args:
        Z: Rows that the columns share, shape ``(r, n)``.
        H: Fields on the spins, shape ``(n, m)``: ``ZᵀV`` for the paper's target ``V``.
        offset: A constant added to each unit's energy, shape ``(m,)``.
        idle: Units without a gradient, which a step does not move, shape ``(m,)``.
        origin: Where the problem comes from, such as the step and the layer: values that JSON can hold.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> problem
        BinaryQuadratic(2 spins, 1 units, 2 rows, torch.float32, cpu)
        >>> problem.energy(torch.tensor([[1.0], [-1.0]]))
        tensor([4.2500])
    """

    Z: Tensor
    H: Tensor
    offset: Tensor
    idle: Tensor
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in ("Z", "H", "offset", "idle")}
        for name, own in named.items():
            if not isinstance(own, Tensor):
                raise TypeError(f"{name} is a tensor, got {type(own).__name__}")
        n, m = self.Z.shape[-1], self.H.shape[-1]
        Z, *found = (tuple(own.shape) for own in named.values())
        if len(Z) != 2 or found != [(n, m), (m,), (m,)]:
            raise ValueError(
                "Z has shape (r, n), H (n, m), offset (m,) and idle (m,); "
                f"got {Z}, {', '.join(map(str, found))}"
            )
        if self.Z.dtype != self.H.dtype or not self.H.is_floating_point():
            raise TypeError(f"Z and H have one real dtype, got {self.Z.dtype} and {self.H.dtype}")

    def __repr__(self) -> str:
        rows, (n, m), idle = len(self.Z), self.H.shape, int(self.idle.sum())
        sizes = f"{n} spins, {m} units, {rows} rows" + (f", {idle} idle" if idle else "")
        return f"{type(self).__name__}({sizes}, {self.H.dtype}, {self.H.device})"

    @classmethod
    def least_squares(cls, Z: Tensor, V: Tensor) -> "BinaryQuadratic":
        """The paper's problem ``‖V - Z G‖²``: ``Z`` has shape ``(r, n)``, ``V`` shape ``(r, m)``."""
        for name, own in (("Z", Z), ("V", V)):
            if not isinstance(own, Tensor) or own.dtype not in (torch.float32, torch.float64):
                kind = own.dtype if isinstance(own, Tensor) else type(own).__name__
                raise TypeError(f"{name} is a tensor of float32 or float64, got {kind}")
            if not bool(own.isfinite().all()):
                raise ValueError(f"{name} has entries that are not finite")
        if Z.ndim != 2 or V.ndim != 2 or len(Z) != len(V):
            raise ValueError(
                "Z and V are matrices with equally many rows, "
                f"got shapes {tuple(Z.shape)} and {tuple(V.shape)}"
            )
        return cls.of(Z, (V.T @ Z).T, V.square().sum(0))

    @classmethod
    def of(cls, Z: Tensor, H: Tensor, offset: Tensor | None = None) -> "BinaryQuadratic":
        """A problem in which no unit is idle, and the offset is zero unless given.

        Raises:
            ValueError: Its energies are not finite.
        """
        for name, own in {"Z": Z, "H": H}.items():
            if not isinstance(own, Tensor) or own.ndim != 2:
                raise TypeError(f"{name} is a matrix, got {_described(own)}")
        none = torch.zeros(H.shape[1], dtype=torch.bool, device=H.device)
        problem = cls(Z, H, H.new_zeros(H.shape[1]) if offset is None else offset, none)
        _check_energies(problem)
        return problem

    @property
    def num_spins(self) -> int:
        return self.H.shape[0]

    @property
    def num_units(self) -> int:
        return self.H.shape[1]

    def energy(self, G: Tensor) -> Tensor:  # (n, m) -> (m,)
        return (self.Z @ G).square().sum(0) - 2 * (self.H * G).sum(0) + self.offset

    def units(self, start: int, stop: int) -> "BinaryQuadratic":
        """The problem of the units ``start`` to ``stop - 1``."""
        own = slice(start, stop)
        return replace(self, H=self.H[:, own], offset=self.offset[own], idle=self.idle[own])

    def in_parts(self, count: int) -> Iterator["BinaryQuadratic"]:
        """The same problem, ``count`` units at a time."""
        for start in range(0, self.num_units, count):
            yield self.units(start, start + count)

    def double(self) -> "BinaryQuadratic":
        """The same problem in double precision."""
        return replace(self, Z=self.Z.double(), H=self.H.double(), offset=self.offset.double())

    def gram(self) -> Tensor:  # (n, n)
        """``ZᵀZ``."""
        return self.Z.T @ self.Z

    def compressed(self) -> "BinaryQuadratic":
        """An equal problem with at most ``n`` rows: the triangular factor of ``Z``.

        (A Cholesky factor of ``ZᵀZ`` would be cheaper, but rows are often nearly dependent and it fails in
        single precision.)
        """
        r, n = self.Z.shape
        return self if r <= n else replace(self, Z=torch.linalg.qr(self.Z, mode="r")[1])

    def to_ising(self, unit: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Biases ``h``, upper-triangular couplings ``J`` and offset.

        Of one unit, with the shapes ``(n,)``, ``(n, n)`` and ``()``; or of all, with ``(n, m)``, ``(n, n)``
        and ``(m,)``: the units share their couplings.
        """
        own = self._chosen(unit)
        gram = self.gram()
        offset = gram.trace() + self.offset[own]  # g² = 1 turns the diagonal into a constant
        return -2 * self.H[:, own], 2 * gram.triu(1), offset

    def to_qubo(self, unit: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Linear terms, upper-triangular quadratic terms and offset over bits: 0 for a spin of -1, 1 for +1.

        Shapes are those of :meth:`to_ising`.

        Example:
            >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
            >>> linear, quadratic, offset = problem.to_qubo(0)
            >>> bits = torch.tensor([1.0, 0.0])
            >>> linear @ bits + bits @ quadratic @ bits + offset  # the energy of the spins +1, -1
            tensor(4.2500)
        """
        h, J, offset = self.to_ising(unit)
        both = (J + J.T).sum(1)
        linear = 2 * (h - (both if unit is not None else both[:, None]))
        return linear, 4 * J, offset + J.sum() - h.sum(0)

    def to_bqm(self, unit: int | None = None) -> "dimod.BinaryQuadraticModel":
        """A dimod model over spins, in double precision.

        Of one unit, over the variables ``0 … n-1``; or of the whole layer, over the variables
        ``(unit, input)``: no term joins two units.

        Raises:
            ValueError: The whole layer has more than 50 million couplings.
        """
        import dimod

        h, J, offset = (t.cpu().numpy() for t in self.double().to_ising(unit))
        if unit is not None:
            return dimod.BinaryQuadraticModel(h, J, float(offset), dimod.SPIN)
        (n, m), (first, second) = self.H.shape, J.nonzero()
        if len(first) * m > MOST_COUPLINGS:
            raise ValueError(
                f"a model of {m} units of {n} inputs has {len(first) * m:,} couplings, of at most "
                f"{MOST_COUPLINGS:,}; take some units: problem.units(0, 8).to_bqm()"
            )
        model = dimod.BinaryQuadraticModel(dimod.SPIN)
        for own in range(m):
            labels = [(own, i) for i in range(n)]
            model.add_linear_from(zip(labels, h[:, own], strict=True))
            pairs = zip(first, second, J[first, second], strict=True)
            model.add_quadratic_from((labels[i], labels[j], value) for i, j, value in pairs)
        model.offset = float(offset.sum())
        return model

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a SHA-256; an existing file is replaced atomically.

        ``origin`` is written with the versions of spingrad and torch.

        Raises:
            TypeError: JSON cannot hold ``origin``.
            ValueError: The energies are not finite, or the dtype is neither float32 nor float64.
        """
        _check_energies(self)
        tensors = {"Z": self.Z, "H": self.H, "offset": self.offset, "idle": self.idle}
        arrays = {name: own.detach().cpu().contiguous().numpy() for name, own in tensors.items()}
        origin = {"versions": {"spingrad": __version__, "torch": str(torch.__version__)}, **self.origin}
        _check_forms(origin, {name: Form(array.dtype, array.shape) for name, array in arrays.items()})
        write_atomically(Path(path), FORMAT.to_bytes(origin, arrays))

    @classmethod
    def load(cls, path: str | Path) -> "BinaryQuadratic":
        """Read a problem that :meth:`save` has written. Nothing is unpickled or executed.

        Names, dtypes and shapes are compared before a tensor is read, and tensors may take 4 GiB.

        Raises:
            ProblemFileError: The file is not a problem, or was changed since it was written.
        """
        try:
            origin, arrays = FORMAT.read(Path(path), _check_forms)
            problem = cls(**{name: torch.from_numpy(array) for name, array in arrays.items()}, origin=origin)
            _check_energies(problem)
            return problem
        except (ValueError, TypeError) as error:
            raise ProblemFileError(f"{path} is not a problem of spingrad: {error}") from None

    def _chosen(self, unit: int | None) -> "int | slice":
        if unit is None:
            return slice(None)
        check_whole("unit", unit, 0, self.num_units - 1)
        return unit

    def lower_bound(self, *, tolerance: float = 1e-6, max_iterations: int = 2000) -> Tensor:  # (m,)
        """An energy that no spins of each unit can go below, in double precision.

        Descent on the box relaxation finds a point with a tight bound; the bound is then evaluated on the
        problem as given (:mod:`spingrad.bounds`), so it holds whenever the descent stops.

        Args:
            tolerance: Stop once the gap of every unit is below this fraction of its energy.
            max_iterations: Stop here in any case.
        """
        if not 0 <= (tolerance := float(tolerance)) < math.inf:
            raise ValueError(f"tolerance is a finite number of at least 0, got {tolerance}")
        check_whole("max_iterations", max_iterations, 1)
        whole = self.double()
        small = whole.compressed()
        G = box_minimum(small.Z, whole.H, whole.offset, tolerance, max_iterations)
        return box_bound(whole.Z, whole.H, whole.offset, G)


@torch.no_grad()
def _check_energies(problem: BinaryQuadratic) -> None:
    """Refuse NaN, infinity, and numbers so large that energies could overflow."""
    norm = float(problem.Z.norm())
    linear, offset = (float(torch.linalg.vector_norm(own, 1)) for own in (problem.H, problem.offset))
    largest = problem.num_spins * norm * norm + 2 * linear + offset  # ‖Z G‖² is at most n ‖Z‖²
    if not largest < torch.finfo(problem.H.dtype).max:
        raise ValueError(
            f"expected finite numbers whose energies are finite in {problem.H.dtype}, got a Z with the norm "
            f"{norm:.3g}, H with the sum {linear:.3g} of its magnitudes and offsets with {offset:.3g}. Look "
            "for NaN and infinity, and make large numbers smaller or use torch.float64; the best spins are "
            "those of Z and V both divided by one number"
        )


def _check_forms(origin: dict[str, Any], forms: dict[str, Form]) -> None:
    """Refuse a file whose tensors do not make a problem; none has been read yet."""
    if set(forms) != {"Z", "H", "offset", "idle"}:
        raise ValueError(f"it must hold the tensors H, Z, idle and offset, got {sorted(forms)[:5]}")
    kinds = {str(forms[name].dtype) for name in ("Z", "H", "offset")}
    if len(kinds) > 1 or not kinds <= {"float32", "float64"} or forms["idle"].dtype != np.bool_:
        raise ValueError(
            "Z, H and offset must have one dtype, float32 or float64, and idle must be bool, got "
            f"{sorted(kinds)} and {forms['idle'].dtype}"
        )
    shapes = [forms[name].shape for name in ("Z", "H", "offset", "idle")]
    match shapes:
        case [[_, n], [same, m], [first], [second]] if n == same and m == first == second:
            return
    raise ValueError(f"Z has shape (r, n), H (n, m), offset and idle (m,), got {shapes}")


def _described(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
