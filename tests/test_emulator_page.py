"""The code in docs/emulator.md and docs/qpu.md does what the pages say."""

import os
import re
import subprocess
import sys
from pathlib import Path

from spingrad.testing.sapi.faults import STAGES

DOCS = Path(__file__).parents[1] / "docs"


def code(page, first_words):
    """The block of Python on a page that begins with these words."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(first_words)]
    return found


def test_a_strangers_tests_use_the_emulator_by_the_page(tmp_path):
    (tmp_path / "conftest.py").write_text(code("emulator.md", "# conftest.py"))
    (tmp_path / "test_mine.py").write_text(code("emulator.md", "# test_mine.py"))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    mine = {"DWAVE_API_TOKEN": "the stranger's own", "DWAVE_API_ENDPOINT": "http://127.0.0.1:9/"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | mine, capture_output=True, text=True, timeout=300
    )
    assert "6 passed" in done.stdout, done.stdout + done.stderr


def test_the_page_names_every_fault():
    named = set(
        re.findall(r"`(\w+)`", (DOCS / "emulator.md").read_text(encoding="utf-8").split("## Faults")[1])
    )
    assert {*STAGES, *(kind for kinds in STAGES.values() for kind in kinds)} <= named


def test_another_annealer_is_wrapped_by_the_page():
    names = {}
    exec(code("qpu.md", "import dimod"), names)
    assert names["solution"].info["timing"]
