"""Each rule of the fold alone: its stages compute what torch does on the numbers that integers stand for."""

import math

import numpy as np
import pytest
import torch
from test_export import batch_norm, made
from torch import nn

from spingrad import BinaryLinear, Gain
from spingrad.export import rules
from spingrad.export.layers import layer_of
from spingrad.export.stages import EXACT, WIDEST, Add, Flow, Pool, Threshold
from spingrad.export.terms import Term
from spingrad.nn.bits import Bits


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def term_of(shape, bound, kind="integers", slope=1.0, offset=0.0):
    """Integers of the input, each of which stands for ``slope * k + offset``, in torch's float32."""
    slope, offset = np.array(slope), np.array(offset)
    steps = ((lambda k: (k * torch.from_numpy(slope) + torch.from_numpy(offset)).float()),)
    return Term(0, Flow(kind, tuple(shape), bound), slope, offset, steps)


def integers(term, count=50):
    random = np.random.default_rng(0)
    size = (count, *term.flow.shape)
    if term.flow.kind == "spins":
        return random.choice([-1, 1], size).astype(np.int32)
    return random.integers(-term.flow.bound, term.flow.bound + 1, size).astype(np.int32)


def numbers(values, term):
    """The numbers that integers stand for: axis 1 has one slope and offset per unit."""
    along = (-1, *[1] * (values.ndim - 2))
    x = values * term.slope.reshape(along) + term.offset.reshape(along)
    for pool in term.pools:
        x = nn.functional.max_pool2d(torch.from_numpy(x), pool.size, pool.stride).numpy()
    return x


def computed(draft, term, *inputs):
    """What the stages of a draft make of integers, by their definitions, as the numbers of the term."""
    values = dict(enumerate(inputs, 1 - len(inputs)))
    for place, (stage, reads) in enumerate(zip(draft.stages, draft.reads, strict=True)):
        values[place + 1] = meaning(stage, *(values[read] for read in reads))
    return numbers(values[term.value], term)


def meaning(stage, *x):
    """A stage by its definition in torch's own functions."""
    name, along = type(stage).__name__, (1, -1, *[1] * (x[0].ndim - 2))
    match name:
        case "Add":
            return sum(m * part for m, part in zip(stage.multipliers, x, strict=True))
        case "Concat":
            return np.concatenate(x, 1)
        case "Flatten":
            return x[0].reshape(len(x[0]), -1)
        case "Pad":
            return np.pad(x[0], ((0, 0), stage.channels, stage.rows, stage.columns))
        case "Pool":
            image = torch.from_numpy(x[0]).double()
            if stage.take == "max":
                return nn.functional.max_pool2d(image, stage.size, stage.stride).numpy().astype(np.int64)
            sums = nn.functional.avg_pool2d(image, stage.size, stage.stride, divisor_override=1)
            return sums.numpy().astype(np.int64)
        case "Threshold" if stage.thresholds is None:
            return np.where(x[0] >= 0, 1, -1)
        case "Threshold":
            beyond = x[0] * stage.directions.reshape(along) >= stage.thresholds.reshape(along)
            return np.where(beyond, 1, -1)
        case "Rescale":
            line = x[0].astype(np.int64) * stage.multipliers.reshape(along) + stage.offsets.reshape(along)
            return np.clip(line >> stage.shift, stage.low, stage.high)
        case "Linear":
            return x[0] @ (np.unpackbits(stage.weight, 1, stage.inputs, "little").astype(int) * 2 - 1).T
    raise AssertionError(name)


def test_spins_become_integers_of_the_same_value():
    draft, term = rules.Draft(), term_of((5,), 1, "spins")
    found = rules.as_numbers(draft, term)
    x = integers(term)
    assert found.flow.kind == "integers"
    np.testing.assert_array_equal(computed(draft, found, x), x)
    assert rules.as_numbers(draft, found) is found


def test_integers_of_one_unit_are_within_half_of_it():
    term = term_of((4,), 100, slope=[0.3, -2.0, 1e-3, 7.0], offset=[0.0, 5.0, -1.0, 2.0])
    draft = rules.Draft()
    found, x = rules.to_integers(draft, term, 1000), integers(term)
    assert found.is_plain
    assert np.abs(computed(draft, found, x) - numbers(x, term)).max() <= found.unit * 0.5001


def test_integers_of_one_factor_are_not_rounded():
    draft, term = rules.Draft(), term_of((4,), 100, slope=0.3)
    found, x = rules.to_integers(draft, term, 1000), integers(term)
    np.testing.assert_allclose(computed(draft, found, x), numbers(x, term), rtol=1e-12)


@pytest.mark.parametrize("slope", [[0.5, 2.0, 3.0], [0.5, -2.0, 3.0]], ids=["rising", "one falls"])
def test_pooling_that_waited_takes_the_largest_number(slope):
    draft, pool = rules.Draft(), Pool("max", (2, 2), (2, 2))
    term = rules.max_pooled(draft, pool, term_of((3, 4, 6), 9, slope=slope, offset=[1.0, 0.0, 0.0]))
    assert not draft.stages
    found, x = rules.pooled(draft, term), integers(term)
    assert not found.pools
    np.testing.assert_allclose(computed(draft, found, x), numbers(x, term), atol=1e-6)


def test_pooling_of_bits_does_not_wait():
    draft, term = rules.Draft(), term_of((3, 4, 6), 1, "spins")
    found, x = rules.max_pooled(draft, Pool("max", (2, 3), (2, 3)), term), integers(term)
    assert found.flow.kind == "spins"
    np.testing.assert_array_equal(
        computed(draft, found, x), nn.functional.max_pool2d(torch.from_numpy(x).float(), (2, 3)).numpy()
    )


def test_a_product_has_its_factor_and_bias():
    layer = made(lambda: BinaryLinear(20, 6, bias=True))
    nn.init.normal_(layer.bias)
    draft, term = rules.Draft(), term_of((20,), 255, "pixels", slope=1 / 64, offset=-0.5)
    found, x = rules.product(draft, layer_of(layer), term), integers(term)
    expected = layer(torch.from_numpy(numbers(x, term)).float()).numpy()
    assert len(draft.stages) == 1
    np.testing.assert_allclose(computed(draft, found, x), expected, atol=1e-5)


def test_sums_of_a_product_stay_below_what_float32_has():
    layer = layer_of(BinaryLinear(1000, 2))
    draft = rules.Draft()
    rules.product(draft, layer, term_of((1000,), EXACT // 1000 + 1))
    assert [type(stage).__name__ for stage in draft.stages] == ["Rescale", "Linear"]
    rules.product(draft := rules.Draft(), layer, term_of((1000,), EXACT // 1000))
    assert [type(stage).__name__ for stage in draft.stages] == ["Linear"]


def test_batch_norm_and_gain_cost_no_stage():
    norm, gain = made(lambda: batch_norm(8)), Gain()
    gain.factor.fill_(0.25)
    draft, term = rules.Draft(), term_of((8,), 60, slope=0.125)
    found, x = rules.gained(gain, rules.normalized(draft, norm, term)), integers(term)
    expected = norm(torch.from_numpy(numbers(x, term)).float()).numpy() * 0.25
    assert not draft.stages
    np.testing.assert_allclose(computed(draft, found, x), expected, atol=1e-5)


def test_a_gain_of_zero_is_refused():
    gain = Gain()
    gain.factor.zero_()
    with pytest.raises(ValueError, match=r"has a factor of 0\.0: run the network in training on a batch"):
        rules.gained(gain, term_of((8,), 60))


def test_the_sign_is_torchs_on_every_integer():
    norm = made(lambda: batch_norm(40))
    draft = rules.Draft()
    found = rules.signed(draft, rules.normalized(draft, norm, term_of((40,), 60, slope=0.125)))
    x = np.arange(-60, 61)[:, None].repeat(40, 1)
    expected = np.where(norm(torch.from_numpy(x * 0.125).float()).numpy() >= 0, 1, -1)
    np.testing.assert_array_equal(computed(draft, found, x), expected)
    assert [type(stage) for stage in draft.stages] == [Threshold]


def test_the_sign_of_spins_is_no_stage():
    draft = rules.Draft()
    assert rules.signed(draft, term_of((4,), 1, "spins")).value == 0
    assert not draft.stages


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (-1.0, 1.0), (-0.25, 6.0)])
def test_clipping_is_as_fine_as_asked(low, high):
    term = term_of((3,), 100, slope=[0.01, -0.07, 0.3], offset=[0.0, 1.0, 0.2])
    draft = rules.Draft()
    found, x = rules.clipped(draft, term, low, high, 2**12, 0.0), integers(term)
    expected = np.clip(numbers(x, term), low, high)
    step = expected.max() / 2**12
    assert found.flow.bound <= 2**12
    assert np.abs(computed(draft, found, x) - expected).max() <= 0.51 * max(step, found.unit)


def test_clipping_at_a_whole_number_of_units_rounds_nothing():
    draft, term = rules.Draft(), term_of((3,), 100, slope=1 / 64)
    found, x = rules.clipped(draft, term, -1.0, 1.0, 2**14, 0.0), integers(term)
    np.testing.assert_array_equal(computed(draft, found, x), np.clip(numbers(x, term), -1, 1))
    assert found.unit == 1 / 64


def test_values_without_a_limit_are_clipped_at_the_largest_of_the_calibration():
    draft, term = rules.Draft(), term_of((3,), 100, slope=0.1, offset=0.05)
    found, x = rules.clipped(draft, term, 0.0, math.inf, 100, 2.0), integers(term)
    assert computed(draft, found, x).max() == pytest.approx(2.0)


def test_intervals_without_zero_are_refused():
    with pytest.raises(ValueError, match=r"clips to 1\.0 … 2\.0; only intervals that hold zero"):
        rules.clipped(rules.Draft(), term_of((3,), 9), 1.0, 2.0, 100, 0.0)


@pytest.mark.parametrize("module", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)], ids=["windows", "image"])
def test_an_average_is_a_sum_of_parts(module):
    draft, term = rules.Draft(), term_of((3, 4, 6), 9, slope=[0.5, -2.0, 3.0], offset=[1.0, 0.0, 2.0])
    found, x = rules.averaged(draft, module, term), integers(term)
    expected = module(torch.from_numpy(numbers(x, term))).numpy()
    np.testing.assert_allclose(computed(draft, found, x), expected, atol=1e-12)


def test_an_average_to_more_than_one_pixel_is_refused():
    with pytest.raises(ValueError, match="averages to 2; only to one pixel can be packed"):
        rules.averaged(rules.Draft(), nn.AdaptiveAvgPool2d(2), term_of((3, 4, 6), 9))


def test_a_flattened_image_counts_one_unit():
    draft, term = rules.Draft(), term_of((3, 2, 2), 9, slope=[0.5, -2.0, 3.0])
    found, x = rules.flattened(draft, term), integers(term)
    np.testing.assert_allclose(computed(draft, found, x), numbers(x, term).reshape(len(x), -1), atol=1e-6)
    assert found.slope.ndim == 0


def test_bits_are_inputs_times_powers_of_two():
    bits = Bits(3)
    draft, term = rules.Draft(), term_of((4,), 9, slope=0.25)
    found, x = rules.doubled(draft, bits, term), integers(term)
    expected = bits(torch.from_numpy(numbers(x, term)).float()).numpy()
    np.testing.assert_allclose(computed(draft, found, x), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("other", "stages"), [(0.25, 1), ([0.3, 0.7, -1.0, 2.0], 2)], ids=["multiples", "rounded"]
)
def test_a_sum_counts_one_unit(other, stages):
    terms = [term_of((4,), 9, slope=0.5), term_of((4,), 9, slope=other)]
    draft = rules.Draft()
    found, x = rules.added(draft, terms), integers(terms[0])
    assert len(draft.stages) == stages
    expected = numbers(x, terms[0]) + numbers(x, terms[1])
    np.testing.assert_allclose(computed(draft, found, x), expected, atol=1e-6)


def test_tensors_of_two_shapes_are_not_added():
    with pytest.raises(ValueError, match=r"adds tensors of the shapes \[\(4,\), \(5,\)\]"):
        rules.added(rules.Draft(), [term_of((4,), 9), term_of((5,), 9)])


def test_joined_tensors_count_one_unit():
    terms = [term_of((4,), 9, slope=0.5), term_of((4,), 9, slope=0.3)]
    draft = rules.Draft()
    found, x = rules.joined(draft, terms, 1), integers(terms[0])
    expected = np.concatenate([numbers(x, term) for term in terms], 1)
    np.testing.assert_allclose(computed(draft, found, x), expected, atol=1e-6)
    with pytest.raises(ValueError, match="joins along dim=2; only inputs or channels"):
        rules.joined(draft, terms, 2)


def test_only_channels_are_repeated():
    draft, term = rules.Draft(), term_of((2, 3, 3), 9)
    found, x = rules.repeated(draft, term, (1, 2, 1, 1)), integers(term)
    np.testing.assert_array_equal(computed(draft, found, x), np.tile(x, (1, 2, 1, 1)))
    with pytest.raises(ValueError, match=r"repeats \(1, 1, 2, 1\); only inputs or channels"):
        rules.repeated(draft, term, (1, 1, 2, 1))


@pytest.mark.parametrize(("pad", "is_signal"), [((1, 2, 3, 0), False), ((1, 2, 1, 1), True)])
def test_padding_adds_zeros_as_torch_does(pad, is_signal):
    draft, term = rules.Draft(), term_of((2, 1, 3), 9, slope=0.5)
    found, x = rules.padded(draft, term, pad, is_signal), integers(term)
    real = torch.from_numpy(numbers(x, term))
    expected = nn.functional.pad(real[:, :, 0] if is_signal else real, pad).numpy()
    np.testing.assert_array_equal(computed(draft, found, x).reshape(expected.shape), expected)


def test_a_number_of_units_is_multiplied_and_everything_else_rounded():
    draft, term = rules.Draft(), term_of((4,), 9, slope=0.5)
    assert rules.in_units(draft, term, 0.5) is term
    assert rules.in_units(draft, term, 0.125).unit == 0.125
    assert draft.stages[-1].multipliers == (4,)
    rounded = rules.in_units(draft, term_of((4,), 9, slope=0.3), 0.125)
    assert rounded.unit == pytest.approx(0.125)


def test_units_are_multiples_if_all_are_whole_and_not_too_many():
    assert rules.multiples([term_of((1,), 1, slope=s) for s in (1.0, 2.5)], 0.5) == (2, 5)
    assert rules.multiples([term_of((1,), 1, slope=s) for s in (1.0, 2.6)], 0.5) == ()
    assert rules.multiples([term_of((1,), 1, slope=float(WIDEST))], 1.0) == ()


def test_only_needed_stages_are_kept():
    draft, term = rules.Draft(), term_of((4,), 9)
    draft.counted(Add((7,)), term, unit=1.0)
    last = draft.counted(Add((2,)), draft.counted(Add((3,)), term, unit=1.0), unit=1.0)
    stages, reads = draft.needed(last.value)
    assert [stage.multipliers for stage in stages] == [(3,), (2,)]
    assert reads == ((0,), (1,))
