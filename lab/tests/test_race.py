"""Writers, readers and reports at the same time on one file of results: no line is lost or torn."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spingrad import _files
from spingrad_lab.runs import read_lines

RESULTS = Path(__file__).parents[1] / "results"
WRITER = """
import json, runpy, sys
from pathlib import Path
files, path, line, writer, count = sys.argv[1:]
append_record = runpy.run_path(files)["append_record"]  # without torch, which takes seconds to import
for number in range(int(count)):
    record = json.loads(line)
    record["job"] |= {"writer": int(writer), "number": number}
    append_record(Path(path), record)
"""


@pytest.mark.parametrize("count", [100, pytest.param(2500, marks=pytest.mark.long)])
def test_four_writers_four_readers_and_two_reports_lose_no_line(count, tmp_path):
    path = tmp_path / "embedding.jsonl"
    line = json.dumps(vars(read_lines(RESULTS / "embedding.jsonl")[0]))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, _files.__file__, path, line, str(writer), str(count)])
        for writer in range(4)
    ]

    def writing() -> bool:
        return any(writer.poll() is None for writer in writers)

    def read(_: int) -> None:
        seen = 0
        while writing():
            lines = read_lines(path)
            assert len(lines) >= seen
            seen = len(lines)

    def report(_: int) -> None:
        again = True
        while again:  # at least once, and once more after the last line
            again = writing()
            command = [
                sys.executable,
                "-c",
                "from spingrad_lab.cli import main; main()",
                "report",
                str(tmp_path),
            ]
            subprocess.run(command, check=True, capture_output=True)

    with ThreadPoolExecutor(6) as pool:
        tasks = [pool.submit(read, place) for place in range(4)] + [
            pool.submit(report, 0),
            pool.submit(report, 1),
        ]
        for task in tasks:
            task.result()
    assert [writer.wait() for writer in writers] == [0] * 4
    found = {(line.job["writer"], line.job["number"]) for line in read_lines(path)}
    assert found == {(writer, number) for writer in range(4) for number in range(count)}
