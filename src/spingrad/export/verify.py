"""Compares a network in torch with its exports.

Every function runs one of them and returns the sums of each layer and the classes; ``numpy.array_equal``
compares two of them. C needs gcc, ONNX needs onnxruntime, QONNX needs qonnx.
"""

import copy
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spingrad._files import write_atomically
from spingrad.export.c import INPUT_TYPES, CSource, to_c
from spingrad.export.layers import int8_weights
from spingrad.export.onnx import DTYPES, to_onnx
from spingrad.export.packed import PackedModel
from spingrad.export.qonnx import layer_sums, to_qonnx
from spingrad.export.stages import PRODUCTS, Array
from spingrad.nn.linear import BinaryLayer

STRICT = ("gcc", "-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror")
_MAIN = """\
#include <stdint.h>
#include <stdio.h>

static int32_t traced[{layers}][{most}];
static const size_t counts[{layers}] = {{{counts}}};

static void keep(int layer, const int32_t *sums, int units, int place, int stride)
{{
    for (int unit = 0; unit < units; unit++)
        traced[layer][place + unit * stride] = sums[unit];
}}

#define {upper}_TRACE(layer, sums, units, place, stride) keep(layer, sums, units, place, stride)
#include "{name}.c"

int main(void)
{{
    {kind} input[{upper}_INPUTS];
    while (fread(input, 1, {upper}_INPUTS, stdin) == {upper}_INPUTS) {{
        const int32_t found = {name}_class(input);
        for (int layer = 0; layer < {layers}; layer++)
            fwrite(traced[layer], sizeof(int32_t), counts[layer], stdout);
        fwrite(&found, sizeof(int32_t), 1, stdout);
    }}
    return 0;
}}
"""


class Answers(NamedTuple):
    """The sums of each layer, one array per layer, and the class of every example.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> answers = from_packed(packed, np.zeros((5, 16), np.uint8))
        >>> [sums.shape for sums in answers.sums], answers.classes.shape
        ([(5, 8), (5, 3)], (5,))
    """

    sums: list[Array]
    classes: Array


@torch.no_grad()
def from_torch(model: nn.Module, x: Tensor, scale: float = 1.0) -> Answers:
    """Runs the torch network itself in float32; ``scale`` is that of :func:`spingrad.export.pack`.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> model = nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))
        >>> answers = from_torch(model, torch.ones(5, 16))
        >>> [sums.shape for sums in answers.sums]
        [(5, 8), (5, 3)]
    """
    layers = [module for module in model.modules() if isinstance(module, BinaryLayer)]
    found: list[Array] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(layer, BinaryLayer)
        sums = layer.product(layer.inputs(inputs[0]), layer.binary_weight)
        found.append((sums / scale if layer is layers[0] else sums).cpu().numpy())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        scores = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return Answers(found, scores.argmax(1).cpu().numpy())


def with_int8(model: nn.Module) -> nn.Module:
    """A copy whose real layers have the weights of the packed network: rounded to int8, unit by unit.

    Example:
        >>> rounded = with_int8(nn.Linear(16, 8))
        >>> levels = rounded.weight / rounded.weight.abs().amax(1, keepdim=True) * 127
        >>> torch.allclose(levels, levels.round(), atol=1e-3)
        True
    """
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            numbers, factor = int8_weights(layer.weight)
            layer.weight.data = (
                torch.from_numpy(numbers * factor[:, None]).to(layer.weight).view_as(layer.weight)
            )
    return model


def from_packed(model: PackedModel, x: Array) -> Answers:
    """Runs the packed network.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> model = nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))
        >>> packed, x = pack(model), np.arange(80, dtype=np.uint8).reshape(5, 16)
        >>> found, expected = from_packed(packed, x), from_torch(model, torch.from_numpy(x).float())
        >>> np.array_equal(found.classes, expected.classes)
        True
    """
    return Answers(model.sums(x), model.classes(x))


def from_c(model: PackedModel, x: Array, flags: Sequence[str] = ("-O2",)) -> Answers:
    """Compiles the C by gcc, with every warning an error, and runs it.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> model = nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))
        >>> packed, x = pack(model), np.arange(80, dtype=np.uint8).reshape(5, 16)
        >>> np.array_equal(from_c(packed, x).classes, from_packed(packed, x).classes)
        True
    """
    shapes = _shapes(model)
    counts = [int(np.prod(shape)) for shape in shapes]
    source = to_c(model, "network")
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(source, _main(model, source, counts), folder, flags)
        content = x.astype(DTYPES[model.kind]).tobytes()
        out = subprocess.run([program], input=content, capture_output=True, check=True).stdout
    parts = np.split(np.frombuffer(out, np.int32).reshape(len(x), -1), np.cumsum(counts), axis=1)
    sums = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=False)]
    return Answers(sums, parts[-1][:, 0])


def compiled(source: CSource, main: str, folder: str | Path, flags: Sequence[str] = ("-O2",)) -> Path:
    r"""Compiles the C together with a ``main`` that includes it; the path of the program.

    Example:
        >>> import tempfile
        >>> from spingrad import BinaryLinear
        >>> from spingrad.export import pack
        >>> source = to_c(pack(BinaryLinear(16, 3)))
        >>> main = '#include "network.c"\nint main(void) { return NETWORK_INPUTS; }'
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     subprocess.run([compiled(source, main, folder)]).returncode
        16
    """
    source.save(folder)
    write_atomically(Path(folder, "main.c"), main.encode())
    subprocess.run([*STRICT, *flags, "main.c", "-o", "main"], cwd=folder, check=True)
    return Path(folder, "main").absolute()


def from_onnx(model: PackedModel, x: Array) -> Answers:
    """Runs the ONNX graph in onnxruntime.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> model = nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))
        >>> packed, x = pack(model), np.arange(80, dtype=np.uint8).reshape(5, 16)
        >>> np.array_equal(from_onnx(packed, x).classes, from_packed(packed, x).classes)
        True
    """
    made = to_onnx(model)
    import onnx

    try:
        import onnxruntime
    except ImportError:
        raise ImportError('running ONNX needs onnxruntime: pip install "spingrad[onnx]"') from None
    names = [f"sums_{layer}" for layer in range(len(model.products))]
    for name in names:
        made.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    batch = x.astype(DTYPES[model.kind]).reshape(-1, *model.shape)
    *sums, classes = session.run([*names, "classes"], {"input": batch})
    return Answers(sums, classes)


def from_qonnx(model: PackedModel, x: Array) -> Answers:
    """Runs the QONNX graph in qonnx's executor.

    Example:
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> model = nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))
        >>> packed, x = pack(model), np.arange(80, dtype=np.uint8).reshape(5, 16)
        >>> np.array_equal(from_qonnx(packed, x).classes, from_packed(packed, x).classes)
        True
    """
    try:
        from qonnx.core.modelwrapper import ModelWrapper
        from qonnx.core.onnx_exec import execute_onnx
        from qonnx.transformation.infer_shapes import InferShapes
    except ImportError:
        raise ImportError('running QONNX needs qonnx: pip install "spingrad[qonnx]"') from None

    wrapped = ModelWrapper(to_qonnx(model, batch=len(x))).transform(InferShapes())
    inputs = {"input": x.astype(np.float32).reshape(-1, *model.shape)}
    found = execute_onnx(wrapped, inputs, return_full_exec_context=True)
    return Answers(layer_sums(model, found), found["scores"].argmax(1))


def _shapes(model: PackedModel) -> list[tuple[int, ...]]:
    pairs = zip(model.stages, model.flows[1:], strict=True)
    return [flow.shape for stage, flow in pairs if isinstance(stage, PRODUCTS)]


def _main(model: PackedModel, source: CSource, counts: list[int]) -> str:
    return _MAIN.format(
        layers=len(counts),
        most=max(counts),
        counts=", ".join(map(str, counts)),
        name=source.name,
        upper=source.name.upper(),
        kind=INPUT_TYPES[model.kind],
    )
