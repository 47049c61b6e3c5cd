"""A network of bits and integers: run it, save it, and load it without trusting the file."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spingrad._files import write_atomically
from spingrad._tensors import Form, Format
from spingrad.export.runtime import Backend, Runtime, chosen
from spingrad.export.stages import (
    PRODUCTS,
    STAGES,
    Array,
    Flow,
    Kind,
    Product,
    Reads,
    Shape,
    Stage,
    chain,
    flows,
)

PACK_FIRST = (
    "A checkpoint of torch weights must be packed first: use spingrad.export.pack(model).save(path), or "
    "spingrad export with --model"
)
FORMAT = Format("spingrad packed network", 2, "network", "a packed network", PACK_FIRST, most=2**30)
_KINDS = {kind.__name__.lower(): kind for kind in STAGES}
_FIELDS = {"kind", "shape", "unit", "stages"}  # of a network in a file


class PackedFileError(ValueError):
    """A file that is not a packed network, or was changed since it was written; the message says why.

    Example:
        >>> PackedModel.load(__file__)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        spingrad.export.packed.PackedFileError: ... is not a packed network: expected a safetensors file ...
    """


@dataclass(frozen=True, eq=False)
class PackedModel:
    """A trained network as it is deployed: one bit per weight, integers between the layers.

    Created by :func:`spingrad.export.pack` or :meth:`load`.

    Args:
        kind: ``"pixels"``, inputs from 0 to 255; ``"int8"``, inputs from -128 to 127; or ``"spins"``, inputs
            of -1 and +1.
        shape: Shape of one example.
        stages: The computations, in order.
        reads: Which values each stage reads: 0 is the input, ``i + 1`` the result of stage ``i``. By default
            every stage reads the result of the one before it.
        unit: What a score of one stands for in the torch network: its scores are about ``unit * scores``.

    Example:
        >>> from spingrad.export.stages import Linear
        >>> bits = np.array([[0b0101], [0b0011]], np.uint8)  # two units of four weights, lowest bit first
        >>> model = PackedModel("pixels", (4,), (Linear(bits, 4),))
        >>> model.scores(np.array([[10, 20, 30, 40]], np.uint8))
        array([[-20, -40]], dtype=int32)
    """

    kind: Kind
    shape: Shape
    stages: tuple[Stage, ...]
    reads: Reads = ()
    unit: float = 1.0

    def __post_init__(self) -> None:
        if not self.reads:
            object.__setattr__(self, "reads", chain(len(self.stages)))
        if not (isinstance(self.unit, float) and 0 < self.unit < math.inf):
            raise ValueError(f"unit must be a positive float, got {self.unit!r}")
        self.flows  # noqa: B018  checks that the stages fit together

    @cached_property
    def flows(self) -> list[Flow]:
        """The input and the result of every stage: the values, by their numbers."""
        return flows(self.kind, self.shape, self.stages, self.reads)

    @property
    def products(self) -> list[Product]:
        """The layers that hold weights."""
        return [stage for stage in self.stages if isinstance(stage, PRODUCTS)]

    @property
    def num_weights(self) -> int:
        return sum(len(stage.weight) * stage.fan_in for stage in self.products)

    def scores(self, x: Array, *, backend: Backend = "auto", threads: int | None = None) -> Array:
        """One integer per class, shape ``(examples, classes)``, int32.

        Args:
            x: A batch of examples, in the model's shape or flat: uint8, int8, or spins of any dtype.
            backend: ``"numba"`` counts bits, ``"numpy"`` multiplies floats, ``"auto"`` is numba if it is
                installed.
            threads: Number of threads that share the examples; by default one per processor.
        """
        return self._runtime(backend).scores(x, threads)

    def classes(self, x: Array, *, backend: Backend = "auto", threads: int | None = None) -> Array:
        """The class with the highest score, the first if several are equal, shape ``(examples,)``."""
        return np.asarray(self.scores(x, backend=backend, threads=threads).argmax(1))

    def sums(self, x: Array, *, backend: Backend = "auto") -> list[Array]:
        """The sums that each linear layer and convolution computes, before its activation."""
        return self._runtime(backend).sums(x)

    def _runtime(self, backend: Backend) -> Runtime:
        name = chosen(backend)
        if name not in self._runtimes:
            self._runtimes[name] = Runtime(self.stages, self.reads, self.flows, name)
        return self._runtimes[name]

    @cached_property
    def _runtimes(self) -> dict[Backend, Runtime]:
        return {}

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a version and a SHA-256; an existing file is replaced atomically."""
        write_atomically(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of the file that :meth:`save` writes."""
        described = []
        tensors: dict[str, Array] = {}
        for place, (stage, reads) in enumerate(zip(self.stages, self.reads, strict=True)):
            fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
            arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
            tensors |= {f"{place}.{name}": np.ascontiguousarray(value) for name, value in arrays.items()}
            plain = {name: value for name, value in fields.items() if name not in arrays}
            name = type(stage).__name__.lower()
            described.append({"stage": name, "reads": reads, **plain, "tensors": sorted(arrays)})
        network = {"kind": self.kind, "shape": self.shape, "unit": self.unit, "stages": described}
        return FORMAT.to_bytes(network, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "PackedModel":
        """Read a packed network.

        Nothing is unpickled or executed. The header is at most 1 MB, the tensors at most 1 GiB, and names,
        dtypes and shapes are compared with the description before a tensor is read.

        Raises:
            PackedFileError: The file is not a packed network, or was changed since it was written.
        """
        path = Path(path)
        try:
            network, tensors = FORMAT.read(path, _check)
            described = network["stages"]
            stages = [_kind(i, one)(**_values(i, one, tensors)) for i, one in enumerate(described)]
            reads = tuple(tuple(one["reads"]) for one in described)
            return cls(network["kind"], tuple(network["shape"]), tuple(stages), reads, network["unit"])
        except (ValueError, TypeError) as error:
            raise PackedFileError(f"{path} is not a packed network: {error}") from None


def _check(network: dict[str, Any], forms: dict[str, Form]) -> None:
    """Raise an error unless the tensors of a file are those of its description; none has been read yet."""
    if set(network) != _FIELDS:
        raise ValueError(f"its network must hold {', '.join(sorted(_FIELDS))}, and nothing else")
    if not isinstance(network["shape"], list) or not isinstance(network["stages"], list):
        raise ValueError("shape and stages must be lists")
    used: set[str] = set()
    for place, described in enumerate(network["stages"]):
        kind, values = _kind(place, described), _values(place, described, forms)
        if not isinstance(described.get("reads"), list):
            raise ValueError(f"stage {place} must have a list of the values that it reads")
        expected = {field.name: field.type for field in dataclasses.fields(kind)}
        if set(values) != set(expected):
            raise ValueError(
                f"stage {place}, {kind.__name__}, needs {sorted(expected)}, got {sorted(values)}"
            )
        for name, value in values.items():
            needs_array = "ndarray" in str(expected[name]) and value is not None
            if needs_array != isinstance(value, Form):
                expected_kind = "a tensor" if needs_array else "a plain value"
                raise ValueError(f"stage {place}, {kind.__name__}: {name} must be {expected_kind}")
        if hasattr(kind, "check_form"):
            stage = object.__new__(kind)
            for name, value in values.items():
                object.__setattr__(stage, name, value)
            stage.check_form()
        used |= {f"{place}.{name}" for name in described["tensors"]}
    if unused := forms.keys() - used:
        raise ValueError(f"no stage uses the tensors {sorted(unused)[:5]}")


def _kind(place: int, described: Any) -> type[Stage]:
    if not isinstance(described, dict) or not isinstance(described.get("tensors"), list):
        raise ValueError(f"stage {place} must be described by its name, its values and a list of its tensors")
    kind = _KINDS.get(str(described.get("stage")))
    if kind is None:
        raise ValueError(
            f"stage {place} must be one of {', '.join(_KINDS)}, got {described.get('stage')!r:.100}"
        )
    return kind


def _values(place: int, described: dict[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stage; those that are tensors, or the forms of them, come from ``tensors``."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in described.items()
        if name not in ("stage", "reads", "tensors")
    }
    for name in described["tensors"]:
        tensor = tensors.get(f"{place}.{name}")
        if tensor is None or name in values:
            raise ValueError(f"stage {place}: the tensor {name!r} is missing, or its name is used twice")
        values[name] = tensor
    return values
