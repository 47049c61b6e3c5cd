import sys

import pytest
import torch

from spingrad import QPSBGD, binary_parameters
from spingrad.nn.gcn import BinaryGCNConv, normalized_adjacency

# torch_geometric still scripts its classes, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture
def graph():
    """Features of nine nodes, the last without edges, and directed edges."""
    pytest.importorskip("torch_geometric")
    generator = torch.Generator().manual_seed(0)
    pairs = torch.tensor([(s, t) for s in range(8) for t in range(8) if s != t])
    chosen = pairs[torch.randperm(len(pairs), generator=generator)[:20]].T
    return torch.randn(9, 5, generator=generator), chosen


def test_layer_equals_torch_geometric_at_its_binary_weights(graph):
    from torch_geometric.nn import GCNConv

    x, edge_index = graph
    layer, theirs = BinaryGCNConv(5, 3, scale=False), GCNConv(5, 3, bias=False)
    theirs.lin.weight.data.copy_(layer.binary_weight)
    torch.testing.assert_close(layer(x, edge_index), theirs(x, edge_index))
    scaled = BinaryGCNConv(5, 3)
    scaled.load_state_dict(layer.state_dict())
    torch.testing.assert_close(scaled(x, edge_index), theirs(x, edge_index) / 5**0.5)


def test_adjacency_equals_its_formula(graph):
    _, edge_index = graph
    dense = torch.eye(9)
    dense[edge_index[1], edge_index[0]] = 1
    scale = dense.sum(1).rsqrt()
    expected = scale[:, None] * dense * scale
    torch.testing.assert_close(normalized_adjacency(edge_index, 9).to_dense(), expected)


def test_edges_and_sparse_matrix_agree(graph):
    x, edge_index = graph
    layer, adjacency = BinaryGCNConv(5, 3), normalized_adjacency(edge_index, 9)
    assert torch.equal(layer(x, edge_index), layer(x, adjacency))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_output_keeps_the_type_of_the_model(graph, dtype):
    x, edge_index = graph
    layer = BinaryGCNConv(5, 3).to(dtype)
    assert layer(x.to(dtype), edge_index).dtype == dtype


def test_chosen_rows_are_rows_of_the_full_result(graph):
    x, edge_index = graph
    layer, adjacency = BinaryGCNConv(5, 3), normalized_adjacency(edge_index, 9)
    rows = torch.tensor([7, 2, 8])
    torch.testing.assert_close(layer(x, adjacency.index_select(0, rows)), layer(x, adjacency)[rows])


def test_the_sketch_holds_the_aggregated_rows(graph):
    x, edge_index = graph
    layer, adjacency = BinaryGCNConv(5, 3), normalized_adjacency(edge_index, 9)
    _optimizer = QPSBGD(binary_parameters(layer), rank=None)
    layer(x, edge_index).sum().backward()
    rows = (adjacency.to_dense() @ x).double()
    torch.testing.assert_close(layer.companion.sketch[0, :5], rows.T @ rows, rtol=1e-5, atol=1e-5)
    assert layer.companion.sketch[0, 5, 0] == 9
    torch.testing.assert_close(layer.weight.grad, (5**-0.5 * rows.sum(0)).float().expand(3, 5))


def test_gradient_flows_to_the_features(graph):
    x, edge_index = graph
    layer, adjacency = BinaryGCNConv(5, 3), normalized_adjacency(edge_index, 9)
    for edges in (edge_index, adjacency, adjacency.index_select(0, torch.tensor([3, 1]))):
        leaf = x.clone().requires_grad_()
        layer(leaf, edges).sum().backward()
        matrix = edges.to_dense() if edges.is_sparse else adjacency.to_dense()
        expected = (matrix.sum(0)[:, None] * layer.binary_weight.sum(0)) / 5**0.5
        torch.testing.assert_close(leaf.grad, expected)


def test_a_step_moves_every_weight_of_two_layers(graph):
    x, edge_index = graph
    model = torch.nn.ModuleList([BinaryGCNConv(5, 4), BinaryGCNConv(4, 3)])
    optimizer = QPSBGD(binary_parameters(model), lr=3e-3)
    before = [layer.weight.detach().clone() for layer in model]
    hidden = torch.nn.functional.hardtanh(model[0](x, edge_index))
    model[1](hidden, edge_index).square().sum().backward()
    optimizer.step()
    for layer, old in zip(model, before, strict=True):
        torch.testing.assert_close((layer.weight - old).abs(), torch.full_like(old, 3e-3))


def test_edges_of_the_wrong_shape_are_explained(graph):
    x, edge_index = graph
    with pytest.raises(ValueError, match=r"shape \(2, E\), got torch.int64 of shape \(20, 2\)"):
        BinaryGCNConv(5, 3)(x, edge_index.T)


def test_a_missing_extra_names_the_command(monkeypatch):
    for name in ("torch_geometric", "torch_geometric.nn.conv.gcn_conv"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "spingrad\[graph\]"'):
        normalized_adjacency(torch.tensor([[0], [1]]), 2)
