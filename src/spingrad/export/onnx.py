"""ONNX: the network in standard operators, for onnxruntime and other programs that read ONNX.

Integers are stored in float32 up to 2^24, where it is exact, and above that in float64.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
    EXACT,
    PRODUCTS,
    Add,
    Array,
    Concat,
    Flatten,
    Flow,
    Kind,
    Linear,
    Pad,
    Pool,
    Product,
    Rescale,
    Stage,
    Threshold,
    whole_weights,
)

if TYPE_CHECKING:
    from onnx import ModelProto

# Old enough for every runtime: by default the newest onnx package writes an IR version that no released
# onnxruntime reads.
OPSET, IR_VERSION = 13, 8
DTYPES: dict[Kind, Any] = {"pixels": np.uint8, "int8": np.int8, "spins": np.int8}
"""What a network reads, by the kind of its inputs."""


def to_onnx(model: PackedModel) -> "ModelProto":
    """A packed network as an ONNX model with the outputs ``scores`` (int32) and ``classes`` (int64).

    The input is called ``input``: uint8 pixels, or spins as int8. The sums of layer k are the tensor
    ``sums_k``. Weights are stored as int8, a quarter of the size of float32.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> made = to_onnx(packed)  # onnx.save(made, path) writes it
        >>> [output.name for output in made.graph.output]
        ['scores', 'classes']
    """
    graph = Graph(model)
    graph.cast("input", "float32", "input_as_float")
    return graph.finished(DTYPES[model.kind])


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

        names, layer = [self.name_of_first], 0
        for place, (stage, reads) in enumerate(zip(self.model.stages, self.model.reads, strict=True)):
            inputs = [names[value] for value in reads]
            if isinstance(stage, PRODUCTS):
                names.append(self._product(stage, inputs[0], f"sums_{layer}"))
                layer += 1
            elif isinstance(stage, Add | Concat):
                names.append(self._several(stage, reads, inputs, place))
            else:
                names.append(self._other(stage, inputs[0], place))
        outputs = self.outputs(names[-1], batch)
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
        spins = whole_weights(stage)
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
                channels, *image = self._before(place).shape
                if tuple(image) == stage.size:  # also in float64, which onnxruntime does not convolve
                    axes = self.constant(f"{output}_axes", [2, 3], np.int64)
                    return self.node("ReduceSum", [x, axes], output, keepdims=1)
                ones = self.constant(f"{output}_ones", np.ones((channels, 1, *stage.size)))
                return self.node(
                    "Conv", [x, ones], output, **_window(stage), dilations=(1, 1), group=channels
                )
            case Threshold():
                return self._threshold(stage, x, place)
            case Rescale():
                return self._rescale(stage, x, place)
            case Pad():
                pairs = (0, 0), stage.channels, stage.rows, stage.columns
                ends = [pair[side] for side in (0, 1) for pair in pairs]
                return self.node("Pad", [x, self.constant(f"{output}_sides", ends, np.int64)], output)
        raise TypeError(f"expected a stage of a packed network, got {stage}")

    def _threshold(self, stage: Threshold, x: str, place: int) -> str:
        output = f"stage_{place}"
        if stage.thresholds is not None and stage.directions is not None:
            shape, dtype = self._along(place), _float(self._before(place))
            limit = self.constant(f"{output}_thresholds", stage.thresholds.reshape(shape), dtype)
            if (stage.directions < 0).any():
                way = self.constant(f"{output}_directions", stage.directions.reshape(shape), dtype)
                x = self.node("Mul", [x, way], f"{output}_directed")
            x = self.node("Sub", [x, limit], f"{output}_above")
            x = self.cast(x, "float32", f"{output}_single") if dtype == np.float64 else x
        elif _float(self._before(place)) == np.float64:
            x = self.cast(x, "float32", f"{output}_single")
        return self.sign(x, output)

    def _before(self, place: int) -> Flow:
        """What a stage with one input reads."""
        return self.model.flows[self.model.reads[place][0]]

    def _along(self, place: int) -> tuple[int, ...]:
        """The shape in which one value per unit meets what a stage reads."""
        return (-1, *[1] * (len(self._before(place).shape) - 1))

    def _several(self, stage: Add | Concat, reads: tuple[int, ...], inputs: list[str], place: int) -> str:
        """A stage that joins branches, in the wider type of what it reads and writes."""
        output, flows = f"stage_{place}", self.model.flows
        dtype = _float(flows[place + 1])
        parts = []
        for number, (value, x) in enumerate(zip(reads, inputs, strict=True)):
            name = f"{output}_part_{number}"
            if _float(flows[value]) != dtype:
                x = self.cast(x, np.dtype(dtype).name, f"{name}_wide")
            if isinstance(stage, Add) and stage.multipliers[number] != 1:
                by = self.constant(f"{name}_by", stage.multipliers[number], dtype)
                x = self.node("Mul", [x, by], name)
            parts.append(x)
        if isinstance(stage, Concat):
            return self.node("Concat", parts, output, axis=1)
        for number, x in enumerate(parts[1:], 1):
            last = number == len(parts) - 1
            parts[0] = self.node("Add", [parts[0], x], output if last else f"{output}_{number}")
        return parts[0] if len(parts) > 1 else self.node("Identity", parts, output)

    def _rescale(self, stage: Rescale, x: str, place: int) -> str:
        """Computed in int64. Adding 2^62 keeps the dividend positive, since ONNX rounds towards zero."""
        output, shape = f"stage_{place}", self._along(place)
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
            for name, end in (("least", stage.low), ("most", stage.high))
        ]
        x = self.node("Clip", [x, *ends], f"{output}_clipped")
        return self.cast(x, np.dtype(_float(self.model.flows[place + 1])).name, output)


def _float(flow: Flow) -> Any:
    """The type in which integers of this size are exact."""
    return np.float32 if flow.bound < EXACT else np.float64


def _window(pool: Pool) -> dict[str, Any]:
    """Attributes of a pooling operator, also those with a default: FPGA tools read them."""
    return {"kernel_shape": pool.size, "strides": pool.stride, "pads": (0, 0, 0, 0)}


def tensor(name: str, dtype: Any, shape: tuple[int | str, ...]) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
