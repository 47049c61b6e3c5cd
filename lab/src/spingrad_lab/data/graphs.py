"""Citation networks from the Planetoid files, and Zachary's karate club."""

import io
import pickle
from collections import defaultdict
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spingrad_lab.data.files import Known, fetch

_SOURCE = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data/"
_KNOWN = {
    "cora.y": Known(4_054, "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1"),
    "cora.tx": Known(148_025, "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a"),
    "cora.ty": Known(28_135, "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad"),
    "cora.allx": Known(257_305, "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543"),
    "cora.ally": Known(47_959, "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71"),
    "cora.graph": Known(59_847, "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d"),
    "cora.test.index": Known(5_000, "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875"),
    "citeseer.y": Known(3_014, "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924"),
    "citeseer.tx": Known(260_321, "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21"),
    "citeseer.ty": Known(24_135, "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce"),
    "citeseer.allx": Known(595_021, "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668"),
    "citeseer.ally": Known(55_623, "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95"),
    "citeseer.graph": Known(61_987, "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7"),
    "citeseer.test.index": Known(5_000, "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4"),
    "pubmed.y": Known(854, "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3"),
    "pubmed.tx": Known(405_505, "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d"),
    "pubmed.ty": Known(12_135, "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd"),
    "pubmed.allx": Known(7_578_385, "508e538e2abdccdd54c4d3e9f49d638b4af7107d85845f66ddea5a5152658b7e"),
    "pubmed.ally": Known(224_739, "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e"),
    "pubmed.graph": Known(471_808, "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9"),
    "pubmed.test.index": Known(6_000, "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5"),
}


class Graph(NamedTuple):
    """Nodes, edges and the split into nodes to train, validate and test on.

    Args:
        features: Features of the nodes, shape ``(nodes, width)``.
        labels: Classes of the nodes, shape ``(nodes,)``.
        edge_index: Source and target of every edge, both directions once, shape ``(2, E)``.
        train: Numbers of the nodes to train on; empty if the graph has no customary split.
        val: Numbers of the nodes to validate on.
        test: Numbers of the nodes to test on.
    """

    features: Tensor
    labels: Tensor
    edge_index: Tensor
    train: Tensor
    val: Tensor
    test: Tensor


def planetoid(name: Literal["cora", "citeseer", "pubmed"]) -> Graph:
    """A citation network with the public split of Yang, Cohen and Salakhutdinov (2016)."""
    if f"{name}.y" not in _KNOWN:
        raise ValueError(f'name is "cora", "citeseer" or "pubmed", got {name!r}')
    y, tx, ty, allx, ally = (_matrix(name, part) for part in ("y", "tx", "ty", "allx", "ally"))
    test = torch.tensor([int(line) for line in _read(name, "test.index").split()])
    # Test nodes without a row in tx, CiteSeer's isolated ones, keep zeros and class 0.
    features = torch.zeros(int(test.max()) + 1, allx.shape[1])
    labels = torch.zeros(len(features), dtype=torch.long)
    features[: len(allx)], features[test] = allx.float(), tx.float()
    labels[: len(ally)], labels[test] = ally.argmax(1), ty.argmax(1)
    train, val = torch.arange(len(y) + 500).split([len(y), 500])
    neighbours = unpickle(_read(name, "graph"))
    edges = torch.tensor([(node, other) for node, others in neighbours.items() for other in others])
    return Graph(features, labels, _simple(edges.T, len(features)), train, val, test.sort().values)


def karate() -> Graph:
    """Zachary's karate club: 34 members, 78 friendships, four communities.

    The features are the paper's identity in binary code: the six bits of a node's number as spins, lowest
    bit first.
    """
    try:
        from torch_geometric.datasets import KarateClub
    except ImportError:
        raise ImportError('karate needs torch_geometric: pip install "spingrad-lab[all]"') from None
    club = KarateClub()[0]
    bits = torch.arange(34)[:, None] >> torch.arange(6) & 1
    none = torch.empty(0, dtype=torch.long)
    return Graph(2.0 * bits - 1, club.y, club.edge_index, none, none, none)


def unpickle(content: bytes) -> Any:
    """The object in a Planetoid file, made only of arrays, sparse matrices, dicts and lists."""
    return _Unpickler(io.BytesIO(content), encoding="latin1").load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _admitted()[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"Planetoid files do not need {module}.{name}; refused") from None


def _admitted() -> dict[tuple[str, str], Any]:
    """What the files may name, under the module paths of Python 2 and its day."""
    from scipy.sparse import csr_matrix

    return {
        ("__builtin__", "list"): list,
        ("collections", "defaultdict"): defaultdict,
        ("numpy", "dtype"): _dtype,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # its module moves
        ("scipy.sparse.csr", "csr_matrix"): csr_matrix,
    }


def _dtype(name: str, align: int, copy: int) -> "np.dtype[Any]":
    return np.dtype(name, bool(align), bool(copy))  # numpy will refuse the files' integers


def _read(name: str, part: str) -> bytes:
    file = f"ind.{name}.{part}"
    return fetch(f"planetoid/{file}", _KNOWN[f"{name}.{part}"], _SOURCE + file)


def _matrix(name: str, part: str) -> Tensor:
    matrix = unpickle(_read(name, part))
    return torch.from_numpy(matrix if isinstance(matrix, np.ndarray) else matrix.toarray())


def _simple(edges: Tensor, num_nodes: int) -> Tensor:
    """Both directions of every edge, once, without self-loops."""
    source, target = torch.cat([edges, edges.flip(0)], 1)[:, (edges[0] != edges[1]).repeat(2)]
    return torch.stack(torch.unravel_index(torch.unique(source * num_nodes + target), (num_nodes, num_nodes)))
