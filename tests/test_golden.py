"""Nothing changes in what is computed: the weights after 50 steps are those of version 0.1.0."""

from pathlib import Path

import golden
import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param("default", marks=pytest.mark.needs("numba")),  # without it, spins are set in blocks
        "momentum=0",
        pytest.param("as_published", marks=[pytest.mark.slow, pytest.mark.needs("numba")]),
    ],
)
@pytest.mark.parametrize("network", golden.NETWORKS)
def test_weights_after_50_steps_have_the_signs_of_version_0_1_0(network, settings, one_thread):
    kept = np.load(Path(golden.__file__).with_name("weights.npz"))
    for place, weight in enumerate(golden.train(network, settings)):
        expected = torch.from_numpy(kept[f"{network}/{settings}/{place}"])
        assert ((weight >= 0) == (expected >= 0)).float().mean() >= 0.999
