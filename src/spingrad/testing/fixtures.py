"""A pytest fixture for code that uses D-Wave's service: ``pytest_plugins = ["spingrad.testing.fixtures"]``.

It is not a plugin that pytest finds by itself, since every run of pytest would then import torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spingrad.testing.sapi import Sapi

SMALL = {"pegasus": 4, "zephyr": 3}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sapi(**options): arguments of the emulator that the fixture sapi starts"
    )


@pytest.fixture
def sapi(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Sapi]:
    """A fresh emulator of D-Wave's service, which D-Wave's client finds for the length of one test.

    It has a small chip unless ``@pytest.mark.sapi(size=…)`` asks for another one. Other settings of D-Wave's
    client on this machine, including the user's token, are hidden from the test.
    """
    marker = request.node.get_closest_marker("sapi")
    options = dict(marker.kwargs) if marker else {}
    options.setdefault("size", SMALL.get(options.get("topology", "pegasus")))
    for name in [name for name in os.environ if name.startswith("DWAVE_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "no-settings.conf"
    config.touch()
    monkeypatch.setenv("DWAVE_CONFIG_FILE", str(config))
    with Sapi(**options) as emulator:
        for name, value in emulator.settings.items():
            monkeypatch.setenv(name, value)
        yield emulator
