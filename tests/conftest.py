import importlib.util
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tests press Ctrl-C; a shell that starts pytest in the background lets it ignore that.
signal.signal(signal.SIGINT, signal.default_int_handler)

NEEDS_DWAVE = [
    "test_diagnostics.py",
    "test_emulator_page.py",
    "test_ocean.py",
    "test_qpu.py",
    "test_qpu_cli.py",
    "test_qpu_faults.py",
    "test_sapi.py",
    "test_transport.py",
]
LONGEST = [
    "test_integration.py",
    "test_ranks.py",
    "test_site.py",
    "test_checkpoint.py",
    "test_sapi.py",
    "test_distributed.py",
]

common = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("default", common, derandomize=True)
settings.register_profile("long", common, max_examples=1700)
settings.load_profile("default")

left_out = NEEDS_DWAVE if importlib.util.find_spec("dwave.system") is None else []
collect_ignore = ["conftest.py", *left_out]


def pytest_collection_modifyitems(items):
    """The longest files first, so that no process waits for another at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup(item):
    """Skip a test marked ``needs("module", …)`` where one of the modules is not installed."""
    for marker in item.iter_markers("needs"):
        for module in marker.args:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module}")


def pytest_report_header():
    """Which files are left out for want of an extra."""
    return f"without the extra qpu, left out: {', '.join(left_out)}" if left_out else None


@pytest.fixture(scope="session")
def data_folder():
    """Real data, or a skip; with SPINGRAD_DATA_REQUIRED set a missing folder is a failure."""
    folder = os.environ.get("SPINGRAD_DATA")
    if folder and os.path.isdir(folder):
        return folder
    if os.environ.get("SPINGRAD_DATA_REQUIRED"):
        pytest.fail(f"SPINGRAD_DATA_REQUIRED is set, but SPINGRAD_DATA={folder!r} is no folder")
    pytest.skip("needs real data: set SPINGRAD_DATA")


@pytest.fixture
def one_thread():
    """Timings on one thread: on a busy machine, threads that wait for each other cost a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sapi_env(tmp_path_factory):
    """No D-Wave settings of this machine, no cache of solver definitions."""
    config = tmp_path_factory.mktemp("dwave") / "dwave.conf"
    config.touch()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DWAVE_")]:
            patch.delenv(name)
        patch.setenv("DWAVE_CACHE_HOME", "off")
        patch.setenv("DWAVE_CONFIG_FILE", str(config))
        yield
