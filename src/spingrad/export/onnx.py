"""ONNX: the network in standard operators, for onnxruntime and other programs that read ONNX.

Integers are stored in float32, which is exact for every sum of a packed network: sums stay below 2^24.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
    Array,
    Convolution,
    Flatten,
    Linear,
    Pool,
    Product,
    Rescale,
    Stage,
    Threshold,
    spins_of_bits,
)

if TYPE_CHECKING:
    from onnx import ModelProto

# Old enough for every runtime: by default the newest onnx package writes an IR version that no released
# onnxruntime reads.
OPSET, IR_VERSION = 13, 8


def to_onnx(model: PackedModel) -> "ModelProto":
    """A packed network as an ONNX model with the outputs ``scores`` (int32) and ``classes`` (int64).

    The input is called ``input``: uint8 pixels, or spins as int8. The sums of layer k are the tensor
    ``sums_k``. Weights are stored as int8, a quarter of the size of float32.
    """
    graph = Graph(model)
    graph.cast("input", "float32", "input_as_float")
    return graph.finished(np.uint8 if model.kind == "pixels" else np.int8)


def need_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ImportError('writing ONNX or QONNX needs onnx: pip install "spingrad[onnx]"') from None


class Graph:
    """The nodes and constants of one network; a subclass may write weights and signs differently."""

    name_of_first = "input_as_float"

    def __init__(self, model: PackedModel) -> None:
        need_onnx()
        self.model = model
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.imports = {"": OPSET}

    def finished(self, dtype: Any, batch: int | str = "batch") -> "ModelProto":
        """The model: the nodes so far, then all stages and the outputs."""
        from onnx import checker, helper, numpy_helper

        x, layer = self.name_of_first, 0
        for place, stage in enumerate(self.model.stages):
            if isinstance(stage, Linear | Convolution):
                x = self._product(stage, x, f"sums_{layer}")
                layer += 1
            else:
                x = self._other(stage, x, place)
        outputs = self.outputs(x, batch)
        graph = helper.make_graph(
            self.nodes,
            "spingrad",
            [tensor("input", dtype, (batch, *self.model.shape))],
            outputs,
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.imports.items()]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="spingrad")
        if set(self.imports) == {""}:
            checker.check_model(made, full_check=True)
        return made

    def outputs(self, last: str, batch: int | str) -> list[Any]:
        """Scores and classes from the output of the last stage."""
        self.cast(last, "int32", "scores")
        self.node("ArgMax", [last], "classes", axis=1, keepdims=0)
        classes = self.model.flows[-1].shape[0]
        return [tensor("scores", np.int32, (batch, classes)), tensor("classes", np.int64, (batch,))]

    def node(self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [output], domain=domain, **attributes))
        return output

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.constants[name] = np.asarray(value, dtype)
        return name

    def cast(self, x: str, dtype: str, output: str) -> str:
        from onnx import helper

        return self.node("Cast", [x], output, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def weight(self, name: str, spins: Array) -> str:
        return self.cast(self.constant(f"{name}_int8", spins, np.int8), "float32", name)

    def sign(self, x: str, output: str) -> str:
        """+1 where x is zero or more, else -1."""
        for name, value in (("zero", 0), ("plus", 1), ("minus", -1)):
            self.constant(name, value)
        self.node("GreaterOrEqual", [x, "zero"], f"{output}_is")
        return self.node("Where", [f"{output}_is", "plus", "minus"], output)

    def _product(self, stage: Product, x: str, output: str) -> str:
        spins = spins_of_bits(stage.bits, stage.fan_in)
        if isinstance(stage, Linear):
            weight = self.weight(f"weight_of_{output}", np.ascontiguousarray(spins.T))
            return self.node("MatMul", [x, weight], output)
        spins = spins.reshape(len(spins), -1, *stage.kernel)
        weight = self.weight(f"weight_of_{output}", spins)
        geometry: dict[str, Any] = {
            "kernel_shape": stage.kernel,
            "strides": stage.stride,
            "pads": stage.padding * 2,
            "dilations": stage.dilation,
            "group": stage.groups,
        }
        return self.node("Conv", [x, weight], output, **geometry)

    def _other(self, stage: Stage, x: str, place: int) -> str:
        output = f"stage_{place}"
        match stage:
            case Flatten():
                return self.node("Flatten", [x], output, axis=1)
            case Pool(take="max"):
                return self.node("MaxPool", [x], output, **_window(stage))
            case Pool():  # a convolution with ones, since ONNX's average would round
                channels = self.model.flows[place].shape[0]
                ones = self.constant(f"{output}_ones", np.ones((channels, 1, *stage.size)))
                return self.node(
                    "Conv", [x, ones], output, **_window(stage), dilations=(1, 1), group=channels
                )
            case Threshold():
                return self._threshold(stage, x, place)
            case Rescale():
                return self._rescale(stage, x, place)
        raise TypeError(f"expected a stage of a packed network, got {stage}")

    def _threshold(self, stage: Threshold, x: str, place: int) -> str:
        output = f"stage_{place}"
        if stage.thresholds is not None and stage.directions is not None:
            shape = (-1, *[1] * (len(self.model.flows[place].shape) - 1))
            limit = self.constant(f"{output}_thresholds", stage.thresholds.reshape(shape))
            if (stage.directions < 0).any():
                way = self.constant(f"{output}_directions", stage.directions.reshape(shape))
                x = self.node("Mul", [x, way], f"{output}_directed")
            x = self.node("Sub", [x, limit], f"{output}_above")
        return self.sign(x, output)

    def _rescale(self, stage: Rescale, x: str, place: int) -> str:
        """Computed in int64. Adding 2^62 keeps the dividend positive, since ONNX rounds towards zero."""
        output, shape = f"stage_{place}", (-1, *[1] * (len(self.model.flows[place].shape) - 1))
        x = self.cast(x, "int64", f"{output}_whole")
        operations = [
            ("Mul", stage.multipliers.reshape(shape)),
            ("Add", stage.offsets.reshape(shape) + 2**62),
            ("Div", 2**stage.shift),
            ("Sub", 2 ** (62 - stage.shift)),
        ]
        for operator, value in operations:
            name = f"{output}_{operator.lower()}"
            x = self.node(operator, [x, self.constant(f"{name}_by", value, np.int64)], name)
        ends = [
            self.constant(f"{output}_{name}", end, np.int64)
            for name, end in (("least", -stage.limit), ("most", stage.limit))
        ]
        x = self.node("Clip", [x, *ends], f"{output}_clipped")
        return self.cast(x, "float32", output)


def _window(pool: Pool) -> dict[str, Any]:
    """Attributes of a pooling operator, also those with a default: FPGA tools read them."""
    return {"kernel_shape": pool.size, "strides": pool.stride, "pads": (0, 0, 0, 0)}


def tensor(name: str, dtype: Any, shape: tuple[int | str, ...]) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
