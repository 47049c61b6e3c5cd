"""Graph convolution: aggregate the neighbours, then a binary linear layer."""

import torch
from torch import Tensor

from spingrad.nn.linear import BinaryLinear


def normalized_adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``Â = D^-½ (A + I) D^-½`` of Kipf and Welling, as a sparse matrix of floats.

    Make it once per graph. ``Â.index_select(0, rows)`` keeps the nodes of a batch.

    Args:
        edge_index: Source and target of every edge, shape ``(2, E)``.
        num_nodes: Number of nodes, with or without edges.

    Example:
        >>> path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])  # 0 - 1 - 2, each edge in both directions
        >>> normalized_adjacency(path, 3).to_dense()
        tensor([[0.5000, 0.4082, 0.0000],
                [0.4082, 0.3333, 0.4082],
                [0.0000, 0.4082, 0.5000]])
    """
    try:
        from torch_geometric.nn.conv.gcn_conv import gcn_norm
    except ImportError:
        raise ImportError('graphs need torch_geometric: pip install "spingrad[graph]"') from None
    if edge_index.dtype != torch.long or edge_index.dim() != 2 or len(edge_index) != 2:
        raise ValueError(
            f"edge_index is a long tensor of shape (2, E), got {edge_index.dtype} "
            f"of shape {tuple(edge_index.shape)}"
        )
    edges, weights = gcn_norm(edge_index, None, num_nodes)
    # COO, since torch still warns that CSR is in beta. Rows are targets, columns are sources.
    matrix = torch.sparse_coo_tensor(edges.flip(0), weights, (num_nodes, num_nodes), check_invariants=True)
    return matrix.coalesce()


class BinaryGCNConv(BinaryLinear):
    """``(Â x) · sign(Ω)ᵀ / √in_features``, a graph convolution whose weights are -1 or +1.

    Arguments as in :class:`~spingrad.nn.linear.BinaryLinear`. The rows of ``X`` are those of ``Â x``, so the
    optimizer sees a linear layer on aggregated nodes.

    Called with the features of all nodes, shape ``(nodes, in_features)``, and the graph: edges of shape
    ``(2, E)``, or a sparse matrix of shape ``(rows, nodes)`` that is used as it is.

    Example:
        >>> mean = torch.tensor([[0.5, 0.5]]).to_sparse()  # one row: a batch of one node
        >>> layer = BinaryGCNConv(4, 3)
        >>> layer(torch.ones(2, 4), mean).shape
        torch.Size([1, 3])
    """

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        is_edges = edge_index.layout == torch.strided
        adjacency = normalized_adjacency(edge_index, len(x)) if is_edges else edge_index
        dtype = torch.promote_types(adjacency.dtype, x.dtype)  # half precision has no sparse product
        return super().forward(torch.sparse.mm(adjacency.to(dtype), x.to(dtype)).to(x.dtype))
