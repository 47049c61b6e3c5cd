"""The contract of the commands: exit codes, one line per error, any terminal."""

import os
import socket
import subprocess
import sys

import pytest

from spingrad._command import Parser, UsageError, number, run, whole
from spingrad.cli import main

PLAN = ["qpu", "plan", "3-2", "--batch-size", "10", "--num-examples", "100"]
EXPORT = ["export", "net.safetensors", "--to", "packed"]


def ending(call, capsys):
    """Exit code of a command, and its one line on stderr."""
    code, line = 0, ""
    try:
        call()
    except SystemExit as stop:
        code, line = (1, stop.code) if isinstance(stop.code, str) else (stop.code, capsys.readouterr().err)
    assert len(line.strip().splitlines()) == (code != 0)
    return code, line


def command(function):
    parser = Parser("tool")
    parser.set_defaults(command=lambda args: function())
    return parser


def fail(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("expected 1,\n  got 2"), 1, "tool: expected 1, got 2"),
        (ImportError("pip install it"), 1, "tool: pip install it"),
        (OSError(28, "No space left on device", "a/file"), 1, "tool: a/file: No space left on device"),
        (FileNotFoundError("there are no runs"), 1, "tool: there are no runs"),
        (KeyError("x"), 1, "tool: unexpected KeyError: 'x'; run again with --debug to see where"),
        (ValueError("\x1b[2Jcleared"), 1, "tool: ?[2Jcleared"),
        (UsageError("add --other"), 2, "tool: add --other; see tool --help\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (KeyboardInterrupt("stopped; 3 runs are kept"), 130, "stopped; 3 runs are kept\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, says, capsys):
    assert ending(lambda: run(command(fail(error)), []), capsys) == (code, says)


def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(KeyError):
        run(command(fail(KeyError("x"))), ["--debug"])


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_debug_may_stand_anywhere(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError):
        main([*EXPORT[:place], "--debug", *EXPORT[place:]])


def test_numbers_have_a_range_and_may_be_fractions():
    assert whole(0, 5)("5") == 5
    assert number(0, 1)("1/255") == 1 / 255
    assert number()("-1e3") == -1000
    for kind, texts in {
        whole(): ("0", "-1", "1.5", "²", "", "9" * 5000),
        number(positive=True): ("0", "-1", "nan", "inf", "1/0", "1/2/3", "x"),
        number(0, 1): ("1.5", "-0.1", "nan"),
    }.items():
        for text in texts:
            with pytest.raises(Exception, match=r"expected a .*number.*, got "):
                kind(text)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["export"],
        ["qpu", "inspect", "x", "--colour"],
        ["qpu", "inspect", "folder"],
        ["qpu", "inspect", "x", "--call", "0"],
        ["export", "folder", "--to", "c"],
        [*EXPORT, "--scale", "nan"],
        [*EXPORT, "--scale", "0"],
        [*EXPORT, "--shift", "inf"],
        [*EXPORT, "--batch", "-1"],
        [*EXPORT, "--shape", "3,0,2"],
        [*EXPORT, "--to", "tflite"],
        [*EXPORT, "--model", "no_colon"],
        [*PLAN, "--annealing-time", "nan"],
        [*PLAN, "--annealing-time", "-1"],
        [*PLAN, "--num-reads", "0"],
        [*PLAN, "--topology", "chimera"],
        ["qpu", "emulate", "--port", "70000"],
        ["qpu", "emulate", "--size", "0"],
        ["qpu", "emulate", "--broken", "2"],
        ["qpu", "emulate", "--noise", "nan", "0"],
        ["qpu", "emulate", "--queue-seconds", "inf"],
        ["qpu", "emulate", "--quota-us", "-1"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_ends_with_exit_code_2(arguments, tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    code, line = ending(lambda: main(arguments), capsys)
    assert code == 2
    assert "--help" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "none.safetensors", "--to", "c"], "none.safetensors: No such file"),
        (["export", "text", "--to", "c"], "text"),
        (["export", "checkpoint.pt", "--to", "c"], "must be packed first"),
        ([*EXPORT, "--model", "os:getcwd"], "os:getcwd: expected it to return a torch.nn.Module, got str"),
        ([*EXPORT, "--model", "os:nothing"], "has no attribute 'nothing'"),
        ([*EXPORT, "--model", "json:loads"], "--debug shows where"),
        ([*EXPORT, "--out", "text/net.safetensors"], "text/net.safetensors: Not a directory"),
        ([*EXPORT, "--out", "folder.safetensors"], "folder.safetensors: it exists and is not a regular"),
        (["export", "net.safetensors", "--to", "c", "--out", "text/net"], "Not a directory"),
        pytest.param(["qpu", "inspect", "text"], "text", marks=pytest.mark.needs("dwave.cloud")),
        pytest.param(["qpu", "inspect", "none"], "none", marks=pytest.mark.needs("dwave.cloud")),
        pytest.param(
            ["qpu", "emulate", "--port", "TAKEN"],
            "in use; choose another",
            marks=pytest.mark.needs("dwave.cloud"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_fails_says_why_in_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    import torch

    from spingrad.export.report import example

    monkeypatch.chdir(tmp_path)
    example((8, 4, 2)).save("net.safetensors")
    torch.save({}, "checkpoint.pt")
    (tmp_path / "text").write_text("my only copy")
    (tmp_path / "folder.safetensors").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [port if argument == "TAKEN" else argument for argument in arguments]
        code, line = ending(lambda: main(arguments), capsys)
    assert code == 1
    assert says in line
    assert (tmp_path / "text").read_text() == "my only copy"


SHELL = r"""

from spingrad._command import Parser, run

def big():
    print("784 \u2192 100\n" * 100_000)

def small():
    print("784 \u2192 100")

parser = Parser("tool")
parser.add_argument("function")
parser.set_defaults(command=lambda args: globals()[args.function]())
run(parser)
"""


def shell(redirect, *arguments, **environment):
    """The command in a process of its own, which imports no torch: exit code, stdout, stderr."""
    import spingrad._command

    code = SHELL.replace("from spingrad._command", "from _command")
    folder = os.path.dirname(spingrad._command.__file__)
    line = f'"$0" -c "$1" {" ".join(arguments)} {redirect}'
    environment = {**os.environ, "PYTHONPATH": folder, **environment}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line, sys.executable, code], env=environment,
                          capture_output=True)  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_output_goes_to_any_terminal_pipe_or_device():
    assert shell("", "small", PYTHONIOENCODING="ascii") == (0, b"784 ? 100\n", "")
    assert shell("", "small", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == (0, b"784 ? 100\n", "")
    for function in ("small", "big", "--help"):
        code, _, said = shell("| true", function)
        assert (code, said) in ((1, ""), (0, ""))  # 0 if all was written before the pipe was closed
        assert shell(">&-", function)[:2] == (0, b"")
    code, first, said = shell("| head -1", "big")
    assert (code, first.decode(), said) == (1, "784 → 100\n", "")
    if os.path.exists("/dev/full"):
        for function in ("small", "big", "--help"):
            said = "tool: standard output: No space left on device\n"
            assert shell("> /dev/full", function) == (1, b"", said)
