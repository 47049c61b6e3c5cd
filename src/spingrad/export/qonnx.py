"""QONNX, the dialect of ONNX that FINN reads: weights and signs are ``BipolarQuant`` nodes."""

from typing import TYPE_CHECKING

import numpy as np

from spingrad.export.onnx import Graph
from spingrad.export.packed import PackedModel
from spingrad.export.stages import Array

if TYPE_CHECKING:
    from onnx import ModelProto

DOMAIN = "qonnx.custom_op.general"


def to_qonnx(model: PackedModel, batch: int = 1) -> "ModelProto":
    """A packed network as a QONNX model; writing it needs onnx, running it needs qonnx.

    The input is called ``input``: integers stored in float32, as FINN expects, annotated as ``UINT8`` or
    ``BIPOLAR``. The outputs are those of :func:`spingrad.export.onnx.to_onnx`.

    Args:
        model: The network. Hardtanh becomes integer arithmetic, which qonnx executes but FINN cannot build.
        batch: Number of examples per call; qonnx needs it to be fixed.
    """
    made = _Graph(model).finished(np.float32, batch)
    note = made.graph.quantization_annotation.add(tensor_name="input")
    kind = {"pixels": "UINT8", "int8": "INT8", "spins": "BIPOLAR"}[model.kind]
    note.quant_parameter_tensor_names.add(key="finn_datatype", value=kind)
    return made


class _Graph(Graph):
    name_of_first = "input"

    def __init__(self, model: PackedModel) -> None:
        super().__init__(model)
        self.imports[DOMAIN] = 1
        self.constant("one", 1)

    def weight(self, name: str, spins: Array) -> str:
        if (np.abs(spins) != 1).any():  # whole numbers
            return self.constant(name, spins)
        return self._bipolar(self.constant(f"{name}_float", spins), name)

    def sign(self, x: str, output: str) -> str:
        return self._bipolar(x, output)

    def _bipolar(self, x: str, output: str) -> str:
        return self.node("BipolarQuant", [x, "one"], output, domain=DOMAIN)
