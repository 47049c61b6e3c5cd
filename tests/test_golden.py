"""Nothing changes in what the published step computes."""

from pathlib import Path

import golden
import numpy as np
import pytest
import torch


@pytest.mark.slow
@pytest.mark.needs("numba")
@pytest.mark.parametrize("network", golden.NETWORKS)
def test_weights_after_50_published_steps_are_those_of_version_0_1_0(network, one_thread):
    kept = np.load(Path(golden.__file__).with_name("weights.npz"))
    for place, weight in enumerate(golden.train(network)):
        expected = torch.from_numpy(kept[f"{network}/as_published/{place}"])
        assert ((weight >= 0) == (expected >= 0)).float().mean() >= 0.999
