"""An emulator of D-Wave's solver API on this machine: tests use the real client without network or token."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from spingrad.testing.sapi.annealer import Annealer
from spingrad.testing.sapi.api import Api
from spingrad.testing.sapi.chip import working_chip
from spingrad.testing.sapi.faults import Fault, Faults
from spingrad.testing.sapi.server import Request, Server
from spingrad.testing.sapi.service import Charge, Service

__all__ = ["Charge", "Fault", "Request", "Sapi"]


class Sapi:
    """An emulated QPU and hybrid solver behind a web service with the interface that D-Wave's client expects.

    It uses the real wire format, refuses what the real service refuses, samples by simulated annealing,
    charges by D-Wave's timing model and fails on demand. ``ledger`` lists what was really charged, also for
    answers that a client never received.

    Args:
        topology: ``"pegasus"`` or ``"zephyr"``.
        size: Grid parameter of the lattice; by default that of a full-size chip, 16 or 12.
        broken: Fraction of the qubits that do not work.
        seed: Determines the broken qubits, the errors that are kept, the faults and, with a problem and its
            label, the samples.
        noise: Standard deviations of the control errors on ``h`` and ``J`` of the scaled problem, which are
            drawn for each job.
        persistent_noise: The same of the errors that each qubit and each coupler keeps. They are drawn once
            for a working graph; :meth:`change_graph` draws others.
        num_sweeps: Sweeps of simulated annealing per read.
        queue_seconds: Seconds that a job waits before it runs.
        quota_us: Microseconds of QPU time that may be charged in total.
        token: The only token that is accepted.
        port: Port on 127.0.0.1; 0 chooses a free one.

    Example:
        >>> with Sapi(size=2) as sapi:
        ...     sapi.solver_name, sapi.charged_us
        ('Advantage_emulated', 0)
    """

    def __init__(
        self,
        topology: str = "pegasus",
        size: int | None = None,
        broken: float = 0.01,
        seed: int = 0,
        noise: tuple[float, float] = (0.0, 0.0),
        persistent_noise: tuple[float, float] = (0.0, 0.0),
        num_sweeps: int = 25,
        queue_seconds: float = 0.0,
        quota_us: float = math.inf,
        token: str = "CANARY-spingrad-emulator-token",
        port: int = 0,
    ) -> None:
        self._lattice = (topology, size, broken)
        self.chip = working_chip(*self._lattice, seed)
        self.faults = Faults(seed)
        annealer = Annealer(self.chip, noise, persistent_noise, seed, num_sweeps)
        self.service = Service(annealer, self.faults, seed, queue_seconds, quota_us)
        self.token = token
        self.server = Server(Api(self.service, token), port)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.release()
        self.server.close()
        self.service.close()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that make D-Wave's client use this emulator."""
        return {
            "DWAVE_API_ENDPOINT": self.url,
            "DWAVE_API_TOKEN": self.token,
            "DWAVE_CACHE_HOME": "off",  # a cached definition would outlive the emulator
        }

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Set these variables in this process inside a ``with`` block."""
        before = {name: os.environ.get(name) for name in self.settings}
        os.environ.update(self.settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @property
    def solver_name(self) -> str:
        return str(self.chip.identity["name"])

    @property
    def charged_us(self) -> float:
        """Microseconds of QPU time charged so far; 20 of hybrid time count as one."""
        return self.service.charged_us

    @property
    def requests(self) -> list[Request]:
        return self.server.requests

    @property
    def fired(self) -> "Counter[tuple[str, str]]":
        """How often each fault, a pair of stage and kind, has occurred."""
        return self.faults.fired

    def change_graph(self, seed: int) -> None:
        """Break other qubits, as a new calibration may do; jobs for the old working graph are refused."""
        self.chip = working_chip(*self._lattice, seed)
        self.service.annealer = replace(self.service.annealer, chip=self.chip)

    def ledger(self) -> list[Charge]:
        """Every accepted job and its cost."""
        return self.service.ledger()

    def inject(
        self, stage: str, kind: str, times: float = 1, probability: float = 1.0, **details: Any
    ) -> None:
        """Inject a fault into the next ``times`` requests or jobs that reach a stage.

        ``faults.STAGES`` lists the kinds of faults of every stage. Their ``details`` are ``code``,
        ``headers``, ``message``, ``seconds``, ``to`` and ``key``.
        """
        self.faults.inject(Fault(stage, kind, **details), times, probability)
