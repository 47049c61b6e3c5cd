"""Nothing changes in what is computed: the weights after 50 steps are those of version 0.1.0."""

from pathlib import Path

import golden
import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    "settings",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "as_published")) for name in golden.SETTINGS],
)
@pytest.mark.parametrize("network", golden.NETWORKS)
def test_weights_after_50_steps_have_the_signs_of_version_0_1_0(network, settings, one_thread):
    kept = np.load(Path(golden.__file__).with_name("weights.npz"))
    for place, weight in enumerate(golden.train(network, settings)):
        expected = torch.from_numpy(kept[f"{network}/{settings}/{place}"])
        assert ((weight >= 0) == (expected >= 0)).float().mean() >= 0.999
