import numpy as np
import pytest
from test_export import SIGN_NETWORKS, images, made
from test_export_c import averages, hardtanh_with_norm

from spinstep.export import pack
from spinstep.export.onnx import to_onnx
from spinstep.export.qonnx import to_qonnx

onnx = pytest.importorskip("onnx")
NETWORKS = [*SIGN_NETWORKS, hardtanh_with_norm, averages]


def run_onnx(packed, x):
    """Sums of every layer, scores and classes, as onnxruntime finds them."""
    runtime = pytest.importorskip("onnxruntime")
    model = to_onnx(packed)
    names = [f"sums_{layer}" for layer in range(len(packed.products))]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kind = np.uint8 if packed.kind == "pixels" else np.int8
    rows = x.astype(kind).reshape(-1, *packed.shape)
    *sums, scores, classes = session.run([*names, "scores", "classes"], {"input": rows})
    return sums, scores, classes


def run_qonnx(packed, x):
    """The same through qonnx's own executor."""
    wrapper = pytest.importorskip("qonnx.core.modelwrapper")
    from qonnx.core.onnx_exec import execute_onnx
    from qonnx.transformation.infer_shapes import InferShapes

    model = wrapper.ModelWrapper(to_qonnx(packed, batch=len(x))).transform(InferShapes())
    rows = x.astype(np.float32).reshape(-1, *packed.shape)
    found = execute_onnx(model, {"input": rows}, return_full_exec_context=True)
    sums = [found[f"sums_{layer}"] for layer in range(len(packed.products))]
    return sums, found["scores"], found["classes"]


@pytest.mark.parametrize("run", [run_onnx, run_qonnx])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.__name__)
def test_exported_graph_computes_the_same_whole_numbers(network, run):
    packed, x = pack(made(network)), images(20)
    sums, scores, classes = run(packed, x)
    for ours, theirs in zip(sums, packed.sums(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(scores, packed.scores(x))
    np.testing.assert_array_equal(classes, packed.classes(x))


@pytest.mark.parametrize("run", [run_onnx, run_qonnx])
def test_spins_go_in_as_they_are(run):
    packed = pack(made(SIGN_NETWORKS[0]), kind="spins")
    x = np.random.default_rng(0).choice([-1, 1], (9, 784))
    np.testing.assert_array_equal(run(packed, x)[1], packed.scores(x))


def test_onnx_has_standard_operators_only_and_stores_a_byte_a_weight():
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
