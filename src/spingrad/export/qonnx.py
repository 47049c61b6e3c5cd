"""QONNX, the dialect of ONNX that FINN and hls4ml read: weights and signs are ``BipolarQuant`` nodes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad.export.onnx import Graph, tensor
from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
    PRODUCTS,
    Array,
    Convolution,
    Pool,
    Product,
    Threshold,
    bits_of_spins,
    is_binary,
    whole_weights,
)

if TYPE_CHECKING:
    from onnx import ModelProto

DOMAIN = "qonnx.custom_op.general"


def to_qonnx(model: PackedModel, batch: int = 1) -> "ModelProto":
    """A packed network as a QONNX model; writing it needs onnx, running it needs qonnx.

    The input is called ``input``, the only output ``scores``; the class is the place of the largest score.
    Both are integers stored in float32, as FINN and hls4ml expect. The input is annotated as ``UINT8`` or
    ``BIPOLAR``.

    A unit whose sign falls with its sum gets negated weights, and the thresholds of a convolution become its
    bias: hls4ml computes other forms of a threshold incorrectly or refuses them. :func:`layer_sums` undoes
    both.

    Args:
        model: The network. Hardtanh, and BatchNorm or a bias behind the last layer, become integer
            arithmetic, which qonnx executes but FINN and hls4ml refuse.
        batch: Number of examples per call; qonnx needs it to be fixed.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> made = to_qonnx(packed, batch=4)  # onnx.save(made, path) writes it
        >>> [output.name for output in made.graph.output]
        ['scores']
    """
    made = _Graph(model).finished(np.float32, batch)
    note = made.graph.quantization_annotation.add(tensor_name="input")
    kind = {"pixels": "UINT8", "int8": "INT8", "spins": "BIPOLAR"}[model.kind]
    note.quant_parameter_tensor_names.add(key="finn_datatype", value=kind)
    return made


def layer_sums(model: PackedModel, tensors: Mapping[str, Array]) -> list[Array]:
    """The sums of every layer, from the tensors ``sums_k`` and ``scores`` of an executed QONNX model."""
    folded, sums = _folded(model), []
    for number, layer in enumerate(model.products):
        # The last sums are the scores, unless BatchNorm follows them.
        found = tensors.get(f"sums_{number}", tensors["scores"])
        if layer in folded:
            directions, bias = (
                values.reshape(-1, *[1] * (found.ndim - 2))
                for values in _directions_and_bias(layer, folded[layer])
            )
            found = directions * (found - bias)
        sums.append(found)
    return sums


class _Graph(Graph):
    name_of_first = "input"

    def __init__(self, model: PackedModel) -> None:
        super().__init__(model)
        self.imports[DOMAIN] = 1
        self.constant("one", 1)
        self.folded = _folded(model)
        self.left = {threshold: _left(layer, threshold) for layer, threshold in self.folded.items()}

    def weight(self, name: str, spins: Array) -> str:
        if (np.abs(spins) != 1).any():  # whole numbers
            return self.constant(name, spins)
        return self._bipolar(self.constant(f"{name}_float", spins), name)

    def sign(self, x: str, output: str) -> str:
        return self._bipolar(x, output)

    def outputs(self, last: str, batch: int | str) -> list[Any]:
        self.nodes[-1].output[0] = "scores"  # Cast and ArgMax would be refused
        return [tensor("scores", np.float32, (batch, self.model.flows[-1].shape[0]))]

    def _product(self, stage: Product, x: str, output: str) -> str:
        if stage not in self.folded:
            return super()._product(stage, x, output)
        directions, bias = _directions_and_bias(stage, self.folded[stage])
        spins = whole_weights(stage) * directions[:, None]
        super()._product(replace(stage, weight=bits_of_spins(spins)), x, output)
        if isinstance(stage, Convolution):
            self.nodes[-1].input.append(self.constant(f"bias_of_{output}", bias))
        return output

    def _threshold(self, stage: Threshold, x: str, place: int) -> str:
        return super()._threshold(self.left.get(stage, stage), x, place)

    def _bipolar(self, x: str, output: str) -> str:
        return self.node("BipolarQuant", [x, "one"], output, domain=DOMAIN)


def _folded(model: PackedModel) -> dict[Product, Threshold]:
    """The binary layers whose weights take over the directions of a threshold, with that threshold.

    The layer must have no other reader. A falling unit of a threshold behind max pooling stays as it is: the
    smallest sum is not the largest one.
    """
    readers = Counter(value for reads in model.reads for value in reads)
    folded: dict[Product, Threshold] = {}
    for stage, (value, *_) in zip(model.stages, model.reads, strict=True):
        if not isinstance(stage, Threshold) or stage.directions is None:
            continue
        while value and readers[value] == 1 and isinstance(pool := model.stages[value - 1], Pool):
            if pool.take != "max" or (stage.directions < 0).any():
                break
            (value,) = model.reads[value - 1]
        layer = model.stages[value - 1] if value else None
        if isinstance(layer, PRODUCTS) and is_binary(layer) and readers[value] == 1:
            folded[layer] = stage
    return folded


def _directions_and_bias(layer: Product, threshold: Threshold) -> tuple[Array, Array]:
    """Factors on a layer's weights, and what is added to its sums: thresholds of convolutions."""
    assert threshold.directions is not None
    assert threshold.thresholds is not None
    bias = -threshold.thresholds if isinstance(layer, Convolution) else np.zeros_like(threshold.thresholds)
    return threshold.directions, bias


def _left(layer: Product, threshold: Threshold) -> Threshold:
    """What remains of a threshold that was folded into a layer."""
    if isinstance(layer, Convolution):
        return Threshold()
    assert threshold.directions is not None
    return Threshold(threshold.thresholds, np.ones_like(threshold.directions))
