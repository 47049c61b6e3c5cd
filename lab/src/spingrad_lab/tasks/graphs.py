"""Nodes of graphs: the Karate club, and citation graphs with and without an encoder."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from spingrad.nn.gcn import BinaryGCNConv, normalized_adjacency
from spingrad_lab.data import Graph, karate, planetoid
from spingrad_lab.tasks.training import Task, accuracy_of, logistic_scores, loss_of


class GCN(nn.Module):
    """An optional real-valued encoder and two binary graph convolutions.

    ``near`` and ``far`` are rows of the normalized adjacency matrix: those of the nodes that are asked for,
    and those of their neighbours.
    """

    def __init__(self, encoder: nn.Module, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.encoder = encoder
        self.first = BinaryGCNConv(sizes[0], sizes[1])
        self.second = BinaryGCNConv(sizes[1], sizes[2])

    def forward(self, x: Tensor, far: Tensor, near: Tensor) -> Tensor:
        hidden = nn.functional.hardtanh(self.first(self.encoder(x), far))
        out: Tensor = self.second(hidden, near)
        return out


class NodeTask(Task):
    """Classes of nodes; a batch sees only its nodes, their neighbours and the neighbours of these."""

    hidden = 10
    graph: Graph
    adjacency: Tensor
    train: Tensor
    test: Tensor

    def network(self) -> nn.Module:
        classes = int(self.graph.labels.max()) + 1
        return GCN(nn.Identity(), (self.graph.features.shape[1], self.hidden, classes))

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        yield self._loss(self.train)

    def _loss(self, nodes: Tensor) -> Callable[[nn.Module], Tensor]:
        inputs, labels = neighbourhood(self.graph.features, self.adjacency, nodes), self.graph.labels[nodes]
        return lambda model: loss_of(model(*inputs), labels)

    def scores(self, model: nn.Module) -> dict[str, float]:
        return self._scores_of({part: model(*self._inputs(part)) for part in ("train", "test")})

    def _scores_of(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        scores = {}
        for part, out in outputs.items():
            labels = self.graph.labels[getattr(self, part)]
            scores[f"{part}_loss"] = float(loss_of(out, labels))
            scores[f"{part}_accuracy"] = accuracy_of(out, labels)
        return scores

    def _inputs(self, part: str) -> tuple[Tensor, Tensor, Tensor]:
        if part not in self.__dict__.setdefault("_kept", {}):
            self._kept[part] = neighbourhood(self.graph.features, self.adjacency, getattr(self, part))
        return self._kept[part]

    _kept: dict[str, tuple[Tensor, Tensor, Tensor]]

    def logistic(self) -> dict[str, float]:
        x, y = self.graph.features, self.graph.labels
        return logistic_scores((x[self.train], y[self.train]), (x[self.test], y[self.test]))


def neighbourhood(x: Tensor, adjacency: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of a :class:`GCN` that give its outputs at ``nodes``."""
    near, neighbours = _rows(adjacency, nodes)
    far, reached = _rows(adjacency, neighbours)
    return x[reached], far, near


def _rows(adjacency: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a sparse matrix without its empty columns, and which columns are left."""
    rows = adjacency.index_select(0, nodes).coalesce()
    (row, column), values = rows.indices(), rows.values()
    left, place = column.unique(return_inverse=True)
    shape = (len(nodes), len(left))
    kept = torch.sparse_coo_tensor(torch.stack([row, place]), values, shape, check_invariants=True)
    return kept.coalesce(), left


@cache
def _citations(name: Literal["cora", "citeseer", "pubmed"], normalize: bool) -> tuple[Graph, Tensor]:
    graph = planetoid(name)
    x = graph.features
    if normalize:
        x = x / x.sum(1, keepdim=True).clamp(min=1e-12)
    x = x / x.square().mean().sqrt()
    return graph._replace(features=x), normalized_adjacency(graph.edge_index, len(x))


class UsualGCN(nn.Module):
    """Kipf and Welling's network: two graph convolutions with real weights, ReLU, dropout.

    Its features are a sparse matrix, of which dropout sees only the entries that are not zero.
    """

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden, bias=False)
        self.second = nn.Linear(hidden, classes, bias=False)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = torch.sparse_coo_tensor(x.indices(), self.dropout(x.values()), x.shape, check_invariants=True)
        hidden = torch.sparse.mm(adjacency, torch.sparse.mm(x, self.first.weight.T)).relu()
        out: Tensor = torch.sparse.mm(adjacency, self.second(self.dropout(hidden)))
        return out


class Citations(NodeTask):
    """A citation graph with its public split; validation nodes are never trained on."""

    name: Literal["cora", "citeseer", "pubmed"]
    epochs = 200
    encoded = True
    fraction = 1 / 16
    """Each epoch is one batch with this fraction of the training nodes."""

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        self.graph, self.adjacency = _citations(self.name, self.encoded)
        self.train, self.test = self.graph.train, self.graph.val if tuning else self.graph.test
        if quick:
            self.epochs = 20

    def network(self) -> nn.Module:
        classes, size = int(self.graph.labels.max()) + 1, self.graph.features.shape[1]
        encoder = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 10))
        return GCN(encoder, (10, self.hidden, classes))

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        count = max(1, round(self.fraction * len(self.train)))
        yield self._loss(self.train[torch.randperm(len(self.train))[:count]])

    def usual_gcn(self) -> dict[str, float]:
        """The usual recipe: rows that sum to one, 16 units, dropout, weight decay on the first layer."""
        x, y = self.graph.features, self.graph.labels
        x = (x / x.sum(1, keepdim=True).clamp(min=1e-12)).to_sparse().coalesce()
        model = UsualGCN(x.shape[1], 16, int(y.max()) + 1)
        optimizer = torch.optim.Adam(model.second.parameters(), lr=0.01)
        optimizer.add_param_group({"params": model.first.parameters(), "weight_decay": 5e-4})
        for _ in range(self.epochs):
            optimizer.zero_grad()
            loss_of(model(x, self.adjacency)[self.train], y[self.train]).backward()
            optimizer.step()
        with torch.no_grad():
            out = model.eval()(x, self.adjacency)
        return self._scores_of({"train": out[self.train], "test": out[self.test]})


class Cora(Citations):
    name = "cora"


class CiteSeer(Citations):
    name = "citeseer"


class PubMed(Citations):
    name = "pubmed"


class Raw(Citations):
    """No encoder: the first binary layer takes the features as they are, in full batches."""

    encoded, exact = False, False
    hidden = 64

    network = NodeTask.network

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        inputs, labels = self._inputs("train"), self.graph.labels[self.train]
        yield lambda model: loss_of(model(*inputs), labels)


class CoraRaw(Raw):
    name = "cora"


class PubMedRaw(Raw):
    name = "pubmed"


class Karate(NodeTask):
    """Five nodes of each class to train, or all of a smaller one; the rest to test."""

    epochs = 150

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        self.graph = karate()
        self.adjacency = normalized_adjacency(self.graph.edge_index, 34)
        classes = [torch.nonzero(self.graph.labels == c)[:, 0] for c in range(4)]
        shuffled = [nodes[torch.randperm(len(nodes))] for nodes in classes]
        self.train = torch.cat([nodes[:5] for nodes in shuffled])
        self.test = torch.cat([nodes[5:] for nodes in shuffled])
        if tuning:  # one training node of each class is held out
            self.train = torch.cat([nodes[1:5] for nodes in shuffled])
            self.test = torch.cat([nodes[:1] for nodes in shuffled])
        if quick:
            self.epochs = 20

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        inputs, labels = self._inputs("train"), self.graph.labels[self.train]
        yield lambda model: loss_of(model(*inputs), labels)


class KarateWide(Karate):
    hidden, exact = 128, False
