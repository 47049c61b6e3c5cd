"""Run an emulated QPU until interrupted, and print the settings of D-Wave's client as shell commands."""

import argparse
import math
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress

from spingrad.testing.sapi import Sapi


def main(argv: Sequence[str] | None = None) -> None:
    needs = 'Needs: pip install "spingrad[qpu]"'
    parser = argparse.ArgumentParser(prog="spingrad qpu emulate", description=f"{__doc__} {needs}")
    parser.add_argument("--topology", choices=["pegasus", "zephyr"], default="pegasus")
    parser.add_argument("--size", type=int, help="grid parameter of the lattice; default: a full-size chip")
    parser.add_argument("--broken", type=float, default=0.01, help="fraction of broken qubits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--noise",
        type=float,
        nargs=2,
        default=(0.0, 0.0),
        metavar=("SIGMA_H", "SIGMA_J"),
        help="standard deviations of the control errors on h and J",
    )
    parser.add_argument("--num-sweeps", type=int, default=25, help="sweeps of simulated annealing per read")
    parser.add_argument("--queue-seconds", type=float, default=0.0, help="seconds that a job waits")
    parser.add_argument(
        "--quota-us", type=float, default=math.inf, help="most microseconds to charge in total"
    )
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 chooses a free one")
    options = vars(parser.parse_args(argv))
    with Sapi(**{**options, "noise": tuple(options["noise"])}) as sapi:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell makes background jobs ignore SIGINT
            signal.signal(number, signal.default_int_handler)
        for name, value in sapi.settings.items():
            print(f"export {name}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
