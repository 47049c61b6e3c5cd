"""QONNX files in the simulations of two FPGA tools, hls4ml and FINN+; ``nox -s fpga`` installs both."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mnist
from torch import nn

from spingrad import BinaryConv2d, BinaryLinear, Sign
from spingrad.export import PackedModel, pack, to_qonnx

pytestmark = pytest.mark.filterwarnings("default")  # those of other projects
TRAINED = sorted((Path(__file__).parents[1] / "lab/results/networks").glob("lfc-*.safetensors"))


def normed(layer, norm):
    """BatchNorm with slopes of both signs."""
    nn.init.normal_(norm.weight)
    for values in (norm.bias, norm.running_mean):
        nn.init.normal_(values)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return [layer, norm]


def plain():
    return nn.Sequential(BinaryLinear(144, 48), Sign(), BinaryLinear(48, 32), Sign(), BinaryLinear(32, 10))


def with_norm():
    return nn.Sequential(
        *normed(BinaryLinear(144, 48), nn.BatchNorm1d(48)), Sign(),
        *normed(BinaryLinear(48, 32), nn.BatchNorm1d(32)), Sign(),
        BinaryLinear(32, 10),
    )  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 12, 12)),
        *normed(BinaryConv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)), nn.MaxPool2d(2), Sign(),
        BinaryConv2d(8, 16, 3), Sign(),
        nn.Flatten(), BinaryLinear(16 * 16, 10),
    )  # fmt: skip


def packed_and_images(network, kind, count=20):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        packed = pack(network().eval(), kind=kind)
    random = np.random.default_rng(0)
    spins = random.choice(np.array([-1, 1], np.int8), (count, 144))
    pixels = np.where(spins > 0, random.integers(0, 256, (count, 144)), 0).astype(np.uint8)
    return packed, spins if kind == "spins" else pixels


def hls4ml_scores(packed, x, folder):
    """Scores of hls4ml's C++, compiled by g++."""
    import hls4ml
    from hls4ml.model.flow import get_flow, update_flow
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
    from qonnx.util.cleanup import cleanup_model

    flow, twice = "vivado:quantization", "vivado:quantize_dense_output"
    if twice in get_flow(flow).optimizers:
        update_flow(flow, remove_optimizers=[twice])  # it quantises bipolar weights again: all become +1
    model = cleanup_model(ModelWrapper(to_qonnx(packed)))
    if len(packed.shape) == 3:
        model = cleanup_model(model.transform(ConvertToChannelsLastAndClean()))
    config = hls4ml.utils.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision="fixed<25,25>"
    )
    if packed.num_weights > 100_000:  # the arrays of the strategy "Latency" do not fit on the stack
        for name, settings in config["LayerName"].items():
            if name.startswith("MatMul"):
                settings |= {"Strategy": "Resource", "ReuseFactor": 1024}
    made = hls4ml.converters.convert_from_onnx_model(
        model, hls_config=config, output_dir=str(folder), backend="Vitis", io_type="io_parallel"
    )
    made.compile()
    return made.predict(x.astype(np.float32).reshape(-1, *packed.shape)).reshape(len(x), -1)


def finn_scores(packed, x, folder):
    """Scores of FINN+'s hardware layers, in its simulation of each layer by numpy."""
    from finn.transformation.fpgadataflow.convert_to_hw import (
        binary_matrix_vector_activation,
        conv_inp_gen,
        pool,
        quantized_matrix_vector_activation,
    )
    from finn.transformation.qonnx.convert_qonnx_to_finn import ConvertQONNXtoFINN
    from finn.transformation.streamline import Streamline, absorb
    from finn.transformation.streamline.reorder import MakeMaxPoolNHWC
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx
    from qonnx.transformation.bipolar_to_xnor import ConvertBipolarMatMulToXnorPopcount
    from qonnx.transformation.infer_data_layouts import InferDataLayouts
    from qonnx.transformation.infer_datatypes import InferDataTypes
    from qonnx.transformation.lower_convs_to_matmul import LowerConvsToMatMul
    from qonnx.util.cleanup import cleanup_model

    # As the steps qonnx_to_finn, streamline and convert_to_hw of FINN+, whose module only loads with Vivado.
    lower = (
        LowerConvsToMatMul,
        MakeMaxPoolNHWC,
        absorb.AbsorbTransposeIntoMultiThreshold,
        MakeMaxPoolNHWC,
        absorb.AbsorbConsecutiveTransposes,
    )
    hardware = (
        binary_matrix_vector_activation.InferBinaryMatrixVectorActivation,
        quantized_matrix_vector_activation.InferQuantizedMatrixVectorActivation,
        pool.InferPool,
        conv_inp_gen.InferConvInpGen,
    )
    steps = [ConvertQONNXtoFINN, Streamline, *(lower if len(packed.shape) == 3 else ())]
    steps += [ConvertBipolarMatMulToXnorPopcount, Streamline, InferDataLayouts, InferDataTypes, *hardware]
    model = cleanup_model(ModelWrapper(to_qonnx(packed)))
    for step in steps:
        model = model.transform(step())
    assert len(model.get_nodes_by_op_type("MVAU")) == len(packed.products)
    if model.get_tensor_datatype("global_in").name == "BINARY":
        x = x > 0  # FINN+'s XNOR layers read spins as bits
    inputs = x.astype(np.float32).reshape(-1, 1, *packed.shape)
    return np.concatenate([execute_onnx(model, {"global_in": own})["global_out"] for own in inputs])


TOOLS = [
    pytest.param(hls4ml_scores, id="hls4ml", marks=pytest.mark.needs("hls4ml")),
    pytest.param(finn_scores, id="finn", marks=pytest.mark.needs("finn")),
]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("network", "kind"), [(plain, "pixels"), (with_norm, "spins"), (convolutional, "pixels")]
)
def test_an_fpga_tool_computes_the_scores_of_the_packed_network(tool, network, kind, tmp_path):
    packed, x = packed_and_images(network, kind)
    expected = packed.scores(x)
    assert len(np.unique(expected, axis=0)) > 10
    np.testing.assert_array_equal(tool(packed, x, tmp_path), expected)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_an_fpga_tool_computes_the_scores_of_trained_networks(tool, path, tmp_path, data_folder):
    packed = PackedModel.load(path)
    images, labels = (own[:100].numpy() for own in mnist("test"))
    x = np.where(images.reshape(100, -1) > 127, 1, -1).astype(np.int8)
    scores = tool(packed, x, tmp_path)
    np.testing.assert_array_equal(scores, packed.scores(x))
    assert (scores.argmax(1) == labels).mean() > 0.95
