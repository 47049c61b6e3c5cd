import os
import signal
import threading
import time

import pytest
import torch

# Tests press Ctrl-C; a shell that starts pytest in the background lets it ignore that.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ["test_paper.py", "test_bench.py", "test_rerun.py", "test_cli.py", "test_distributed.py"]


def pytest_collection_modifyitems(items):
    """The longest files first, so that no process waits for another at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


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


@pytest.fixture
def clock(tmp_path_factory):
    """Seconds by a clock that stands still while the machine keeps this process or its disk waiting.

    A thread sleeps 10 ms and syncs a file, again and again; of each round no more than 50 ms count.
    """
    now, over = 0.0, threading.Event()

    def tick():
        nonlocal now
        with (tmp_path_factory.mktemp("clock") / "ticks").open("wb", buffering=0) as file:
            last = time.monotonic()
            while not over.wait(0.01):
                file.write(b".")
                os.fsync(file.fileno())
                this = time.monotonic()
                now += min(this - last, 0.05)
                last = this

    thread = threading.Thread(target=tick)
    thread.start()
    yield lambda: now
    over.set()
    thread.join()


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
