"""Run the emulator until interrupted; its output is for ``eval`` in a shell."""

import argparse
import math
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress

from spingrad.testing.sapi import Sapi


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spingrad.testing.sapi", description=__doc__)
    parser.add_argument("--topology", choices=["pegasus", "zephyr"], default="pegasus")
    parser.add_argument("--size", type=int, help="grid parameter of the lattice")
    parser.add_argument("--broken", type=float, default=0.01, help="fraction of broken qubits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, nargs=2, default=(0.0, 0.0), metavar=("SIGMA_H", "SIGMA_J"))
    parser.add_argument("--num-sweeps", type=int, default=25)
    parser.add_argument("--queue-seconds", type=float, default=0.0)
    parser.add_argument("--quota-us", type=float, default=math.inf)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    options = vars(parser.parse_args(argv))
    with Sapi(**{**options, "noise": tuple(options["noise"])}) as sapi:
        for number in (signal.SIGINT, signal.SIGTERM):  # a job in the background is born deaf to the first
            signal.signal(number, signal.default_int_handler)
        for name, value in sapi.settings.items():
            print(f"export {name}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
