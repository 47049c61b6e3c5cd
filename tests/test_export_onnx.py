from importlib.util import find_spec

import numpy as np
import pytest
from test_export import SIGN_NETWORKS, images, made
from test_export_c import assert_same, averages, hardtanh_with_norm

from spingrad.export import pack, verify
from spingrad.export.onnx import to_onnx
from spingrad.export.qonnx import to_qonnx

onnx = pytest.importorskip("onnx")
NETWORKS = [*SIGN_NETWORKS, hardtanh_with_norm, averages]


RUNS = [
    pytest.param(
        verify.from_onnx,
        id="onnx",
        marks=pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs onnxruntime"),
    ),
    pytest.param(
        verify.from_qonnx, id="qonnx", marks=pytest.mark.skipif(not find_spec("qonnx"), reason="needs qonnx")
    ),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.__name__)
def test_exported_graph_computes_the_same_integers(network, run):
    packed, x = pack(made(network)), images(20)
    assert_same(run(packed, x), packed, x)


@pytest.mark.parametrize("run", RUNS)
def test_spins_are_accepted_as_inputs(run):
    packed = pack(made(SIGN_NETWORKS[0]), kind="spins")
    x = np.random.default_rng(0).choice([-1, 1], (9, 784))
    assert_same(run(packed, x), packed, x)


def test_onnx_has_only_standard_operators_and_stores_one_byte_per_weight():
    packed = pack(made(SIGN_NETWORKS[1]))
    model = to_onnx(packed)
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.domain for opset in model.opset_import] == [""]
    assert packed.num_weights < model.ByteSize() < packed.num_weights + 8_000


def test_qonnx_says_which_tensors_are_bipolar():
    wrapper = pytest.importorskip("qonnx.core.modelwrapper")
    from qonnx.transformation.infer_datatypes import InferDataTypes
    from qonnx.transformation.infer_shapes import InferShapes

    packed = pack(made(SIGN_NETWORKS[0]))
    model = wrapper.ModelWrapper(to_qonnx(packed)).transform(InferShapes()).transform(InferDataTypes())
    assert model.get_tensor_datatype("input").name == "UINT8"
    for tensor in ("weight_of_sums_0", "weight_of_sums_1", "stage_1", "stage_3"):
        assert model.get_tensor_datatype(tensor).name == "BIPOLAR"
    assert model.get_tensor_shape("sums_1") == [1, 70]


@pytest.mark.parametrize("network", SIGN_NETWORKS[:3], ids=lambda n: n.__name__)
def test_qonnx_has_no_operator_that_fpga_tools_refuse(network):
    graph = to_qonnx(pack(made(network))).graph
    assert [output.name for output in graph.output] == ["scores"]
    accepted = {"BipolarQuant", "MatMul", "Conv", "Sub", "MaxPool", "Flatten"}
    assert {node.op_type for node in graph.node} <= accepted
    for node in graph.node:
        if node.op_type in ("Conv", "MaxPool"):
            assert {"pads", "strides", "kernel_shape"} <= {attribute.name for attribute in node.attribute}
