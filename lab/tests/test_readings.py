import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad_lab.methods import DEFAULT, METHODS, PAPER_READING, PUBLISHED, SCALED_MEAN, Reading
from spingrad_lab.paper.readings import METHODS as ROWS
from spingrad_lab.paper.readings import NETWORKS, PAPER, READINGS, SIGN_SGD
from spingrad_lab.runs import Lab, read_lines, to_frame
from spingrad_lab.tasks.small import mlp
from spingrad_lab.tasks.training import as_read, loss_as_read, loss_of


def test_the_default_is_the_class_with_a_learning_rate_and_nothing_else():
    params = list(binary_parameters(mlp(4, 3)))
    found = METHODS[DEFAULT].make(params, seed=3, lr=0.1)
    assert found.state_dict() == QPSBGD(params, 0.1, seed=3).state_dict()
    assert vars(found.solver).keys() == vars(QPSBGD(params).solver).keys()
    assert {tuple(settings) for settings in METHODS[DEFAULT].trials} == {("lr",)}


def test_the_published_step_is_read_as_the_paper_writes_it():
    for method in (PUBLISHED, f"{PUBLISHED}, exact"):
        assert METHODS[method].reading == PAPER_READING == Reading("sum", scale=False)
    assert METHODS[SCALED_MEAN].reading == METHODS[DEFAULT].reading == Reading("mean", scale=True)


def test_an_unscaled_network_adds_its_inputs_up():
    network = as_read(mlp(4, 1), PAPER_READING)
    layer = network.get_submodule("0")
    assert isinstance(layer, BinaryLinear)
    nn.init.ones_(layer.weight)
    assert network(torch.ones(1, 4)).item() == 4
    assert as_read(mlp(4, 1), Reading()).get_submodule("0").scale == 0.5


def test_a_summed_loss_is_the_mean_times_the_rows_of_the_batch():
    network, x, y = mlp(4, 3), torch.randn(5, 4), torch.arange(5) % 3

    def mean(model):
        return loss_of(model(x), y)

    expected = nn.functional.cross_entropy(network(x), y, reduction="sum")
    torch.testing.assert_close(loss_as_read(mean, PAPER_READING)(network), expected)
    torch.testing.assert_close(loss_as_read(mean, Reading())(network), mean(network))


def test_learning_rates_cover_five_decades():
    for network in NETWORKS.values():
        rates = [settings["lr"] for settings in network.rates()]
        assert rates[-1] / rates[0] == pytest.approx(1e5)


def test_every_reading_has_a_row_and_a_verdict(data_folder, tmp_path, monkeypatch):
    name = "Adult, 15-10-1"
    monkeypatch.setattr("spingrad_lab.paper.readings.NETWORKS", {name: NETWORKS[name]})
    monkeypatch.setattr("spingrad_lab.paper.readings.pair_points", lambda quick: None)
    lab = Lab("readings", READINGS, tmp_path, quick=True, workers=0)
    READINGS.plan(lab)
    section = READINGS.show(to_frame(read_lines(lab.path)))
    verdict, table = section.tables
    assert [row[0] for row in table.rows] == list(ROWS)
    assert {(row[0], row[1]) for row in verdict.rows} == {(name, PAPER)}
    assert [row[2] for row in verdict.rows] == list(SIGN_SGD)
    assert section.figures[0].svg.startswith("<svg")
