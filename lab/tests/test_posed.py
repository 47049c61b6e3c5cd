"""The problems that a batch poses, taken from a copy of the network and made by hand."""

import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.optim import capture
from spingrad_lab.beyond.step import CANDIDATES
from spingrad_lab.posed import moving, posed, scaled, target_squares


def network_and_loss():
    torch.manual_seed(0)
    network = nn.Sequential(BinaryLinear(6, 4), nn.Hardtanh(), BinaryLinear(4, 2))
    x, y = torch.randn(30, 6), torch.randint(2, (30,))
    return network, lambda model: nn.functional.cross_entropy(model(x), y)


def test_the_problems_of_a_batch_are_those_of_a_step_and_the_network_stays_as_it_is():
    network, loss = network_and_loss()
    settings = {"target_rms": 1.0, "rank": None}
    found, before = posed(network, loss, **settings), network[0].weight.detach().clone()
    assert torch.equal(network[0].weight, before)
    assert network[0].weight.grad is None
    optimizer = QPSBGD(binary_parameters(network), momentum=0.0, **settings)
    with capture(optimizer, steps=[0]) as expected:
        loss(network).backward()
        optimizer.step()
    for own, other in zip(found, expected, strict=True):
        assert own.origin == other.origin
        torch.testing.assert_close((own.gram().float(), own.H.float()), (other.gram(), other.H))


def test_rows_by_hand_have_the_couplings_of_the_optimizers_and_fields_in_the_same_directions():
    x, grad = torch.randn(30, 6).double(), torch.randn(30, 4).double()
    grad[::3] = 0
    layer = BinaryLinear(6, 4, scale=False)
    (own,) = posed(layer, lambda model: (model(x) * grad).sum(), target_rms=1.0, rank=None)
    by_hand = scaled(x, grad)
    torch.testing.assert_close(own.gram(), by_hand.gram())
    directions = [nn.functional.normalize(problem.H, dim=0) for problem in (own, by_hand)]
    torch.testing.assert_close(*directions)
    torch.testing.assert_close(target_squares(own), by_hand.offset)


def test_a_problem_without_idle_units_has_the_others():
    problem = BinaryQuadratic(
        torch.eye(2),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([5.0, 6.0]),
        torch.tensor([True, False]),
    )
    assert moving(problem).H.tolist() == [[2.0], [4.0]]
    assert moving(problem).offset.tolist() == [6.0]


@pytest.mark.parametrize("name", [name for name, own in CANDIDATES.items() if not own.rival])
def test_a_step_of_every_candidate_moves_weights_with_a_gradient_by_the_learning_rate(name):
    network, loss = network_and_loss()
    candidate = CANDIDATES[name]
    optimizer = candidate.make(binary_parameters(network), seed=0, **candidate.trials[0])
    for _ in range(3):
        before = [weight.detach().clone() for weight in network.parameters()]
        optimizer.zero_grad()
        loss(network).backward()
        optimizer.step()
        for old, new in zip(before, network.parameters(), strict=True):
            moved = (new - old).abs()[new.grad.abs().amax(1) > 1e-6]
            assert len(moved)
            expected = torch.full_like(moved, optimizer.param_groups[0]["lr"])
            torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)
