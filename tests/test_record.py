import pytest
import torch

from spingrad.record import LayerRecord, Record


def test_rows_must_agree():
    with pytest.raises(ValueError, match="equally many rows, got 3 and 2"):
        LayerRecord(torch.zeros(3, 4), torch.zeros(2, 5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["x", "grad"])
def test_a_single_bad_entry_is_seen(value, field):
    tensors = {"x": torch.randn(30, 4), "grad": torch.randn(30, 5)}
    assert LayerRecord(**tensors).is_finite()
    tensors[field][17, 2] = value
    assert not LayerRecord(**tensors).is_finite()


def test_clearing_forgets_every_pass():
    record = Record()
    record.add(torch.zeros(2, 3), torch.zeros(2, 1), lambda x, grad: [(x, grad)])
    assert len(record.layers()) == 1
    record.clear()
    assert record.layers() == []
