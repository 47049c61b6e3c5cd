"""What every command keeps: its exit codes, one line per error, and arguments with a type and a range.

A command ends with 0 (done), 1 (failed), 2 (called wrongly) or 130 (stopped by Ctrl-C). An error is one line
on stderr; ``--debug`` shows its traceback. Characters that the terminal does not have are printed as ``?``.
"""

import argparse
import errno
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class UsageError(ValueError):
    """The arguments of a command do not fit together; the command ends with exit code 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; every command has ``--debug``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No default: that of a subcommand would overwrite a --debug given before its name.
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}; see {self.prog} --help\n")


def run(parser: Parser, arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, then call the function that they set as ``command``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    args = argparse.Namespace()
    try:
        try:
            parser.parse_args(arguments, args)
            args.command(args)
        except OSError as error:
            if error.errno and error.filename is None:
                _flush_stdout("\n")  # if the error was that of standard output, it comes again, with its name
            raise
        finally:
            _flush_stdout()
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if getattr(args, "debug", False):
            raise
        if isinstance(error, UsageError):
            parser.error(str(error))
        sys.exit(1 if isinstance(error, _NobodyReadsError) else f"{parser.prog}: {_description(error)}")


class _NobodyReadsError(OSError):
    """Standard output is a pipe that was closed, as by ``| head -1``."""


def _flush_stdout(text: str = "") -> None:
    """Write what is buffered. After an error the rest goes nowhere, or Python would try again at its exit."""
    if sys.stdout is None:  # closed by the caller
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        closed = error.errno in (errno.EPIPE, errno.EINVAL)  # EINVAL on Windows
        kind = _NobodyReadsError if closed else OSError
        raise kind(error.errno, error.strerror, "standard output") from None


def _description(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return _one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, ImportError | OSError | ValueError):
        return _one_line(str(error) or type(error).__name__)
    return _one_line(f"unexpected {type(error).__name__}: {error}; run again with --debug to see where")


def _one_line(text: str) -> str:
    """Also without control characters, which a file name or a server's answer may contain."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


# Types of arguments


def whole(low: int = 1, high: int = 10**9) -> Callable[[str], int]:
    """Whole numbers in a range that includes its ends."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            _refuse(f"a whole number from {low} to {high}", text)
        return value

    return parse


def number(
    low: float = -math.inf, high: float = math.inf, *, positive: bool = False
) -> Callable[[str], float]:
    """Finite numbers in a range that includes its ends, also as fractions: ``1/255``."""

    def parse(text: str) -> float:
        top, _, bottom = text.partition("/")
        try:
            value = float(top) / float(bottom or 1)
        except (ValueError, ZeroDivisionError):
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high and (value > 0 or not positive)):
            ends = f" from {low:g} to {high:g}" if math.isfinite(high) else f" of at least {low:g}"
            kind = "positive " if positive else "finite "
            _refuse(f"a {kind}number{ends if math.isfinite(low) else ''}", text)
        return value

    return parse


def input_file(text: str) -> Path:
    """A file to read. If there is none, the error is that of opening it."""
    if os.path.isdir(text):
        _refuse("a file", f"{text}, which is a folder")
    return Path(text)


def folder(text: str) -> Path:
    """A folder, which need not exist yet."""
    if os.path.exists(text) and not os.path.isdir(text):
        _refuse("a folder", f"{text}, which is a file")
    return Path(text)


def _refuse(expected: str, arrived: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"expected {expected}, got {arrived!r}")
