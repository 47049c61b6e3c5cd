import os

import pytest


@pytest.fixture(scope="session")
def data_folder():
    """Real data, or a skip; with SPINSTEP_DATA_REQUIRED set a missing folder is a failure."""
    folder = os.environ.get("SPINSTEP_DATA")
    if folder and os.path.isdir(folder):
        return folder
    if os.environ.get("SPINSTEP_DATA_REQUIRED"):
        pytest.fail(f"SPINSTEP_DATA_REQUIRED is set, but SPINSTEP_DATA={folder!r} is no folder")
    pytest.skip("needs real data: set SPINSTEP_DATA")
