import pytest

from spingrad_lab.methods import USUAL_GCN
from spingrad_lab.paper.graphs import CITESEER, CORA, CORA_RAW, KARATE, PUBMED, PUBMED_RAW
from spingrad_lab.runs import seeded
from spingrad_lab.tasks.graphs import CoraRaw

# torch_geometric compiles a few functions with the deprecated torch.jit when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_every_citation_graph_has_the_usual_network_as_a_control():
    assert all(own.usual_gcn for own in (CORA, PUBMED, CITESEER, CORA_RAW, PUBMED_RAW))
    assert not KARATE.usual_gcn


def test_the_control_reaches_what_such_networks_reach_on_cora(data_folder):
    job = {"stage": "final", "task": "Cora", "method": USUAL_GCN, "seed": 0, "quick": False}
    assert CORA_RAW.compute(job)["test_accuracy"] > 0.8


def test_a_control_changes_neither_the_features_nor_the_graph(data_folder):
    with seeded(0):
        task = CoraRaw(0, False, True)
        features = task.graph.features.clone()
        task.usual_gcn()
    assert (task.graph.features == features).all()
