"""D-Wave's web service, through D-Wave's own client: single requests that end, and a token that stays here.

The client's futures are not used. They retry and poll by rules of their own, some without end, and a
failed one does not tell whether the job was accepted; here every request is made once, and
:mod:`~spinstep.qpu.submission` decides what follows.
"""

import base64
import binascii
import ipaddress
import logging
import math
import os
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from spinstep.qpu.chip import Chip, Ints, client_module
from spinstep.qpu.packing import Programmed, Spins

FOLLOWED = ("dwavesys.com",)  # hosts that a configuration may name without being asked


class ServiceError(Exception):
    """A request that failed.

    Args:
        message: What the service or the network said.
        refused: The service took no notice of the request: a job cannot have come of it.
        fatal: Trying again cannot help.
        retry_after: Seconds that the service asks to wait.
    """

    def __init__(
        self, message: str, *, refused: bool = False, fatal: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.refused, self.fatal, self.retry_after = refused, fatal, retry_after


class Status(NamedTuple):
    """A job as the service lists it."""

    id: str
    label: str | None
    state: str


class Answer(NamedTuple):
    """Distinct samples in order of energy, how often each came, and the time that was charged."""

    spins: Spins  # (k, q), in the order of the problem's qubits
    occurrences: Ints  # (k,)
    charged_us: float | None


class QPUService:
    """One QPU behind D-Wave's solver API.

    The token comes from ``DWAVE_API_TOKEN`` or from D-Wave's configuration file of the user or the system
    (``dwave config create``), never from an argument. A ``dwave.conf`` in the working directory is obeyed
    only if it is named. Connections are encrypted unless they stay on this machine, and redirects are
    refused: the client would send the token along.

    Args:
        solver: Name of the QPU; by default that of the configuration, or the first that is online.
        endpoint: Address of the solver API; by default that of the configuration, or D-Wave's.
        config_file: Another configuration file.
        profile: Profile in the configuration file.
        request_timeout: Seconds that a single request may take.
    """

    def __init__(
        self,
        solver: str | None = None,
        *,
        endpoint: str | None = None,
        config_file: str | None = None,
        profile: str | None = None,
        request_timeout: float = 60.0,
    ) -> None:
        settings = _settings(config_file, profile)
        self.endpoint = _checked_endpoint(endpoint, settings)
        self.request_timeout = request_timeout
        self._token = settings.get("token") or ""
        if not self._token:
            raise ValueError(
                "no token for D-Wave's service: set DWAVE_API_TOKEN, or run `dwave config create` once"
            )
        self._local = threading.local()  # the client's sessions belong to one thread each
        _keep_out_of_logs(self._token)
        self.solver = solver or _named_solver(settings.get("solver"))
        self.chip = self.fetch_chip()

    def __repr__(self) -> str:
        return f"QPUService(solver={self.solver!r}, endpoint={self.endpoint!r})"

    def fetch_chip(self) -> Chip:
        """The QPU's definition as it is now; asks the service."""
        if self.solver is None:
            found = self._ask(lambda api: api.Solvers, "list_solvers", "none,+identity,+status,+properties")
            online = [s for s in found if s.status == "ONLINE" and s.properties.get("category") == "qpu"]
            if not online:
                raise RuntimeError(f"{self.endpoint} has no QPU online for this token")
            definition = online[0]
            self.solver = definition.identity.name
        else:
            definition = self._ask(lambda api: api.Solvers, "get_solver", self.solver)
        version = definition.identity.version
        return Chip(definition.identity.name, version and version.graph_id, definition.properties)

    def submit(self, problem: Programmed, label: str, params: dict[str, Any]) -> str:
        """Send a job and return its id."""
        models = client_module("dwave.cloud.api.models")
        version = {"graph_id": self.chip.graph_id} if self.chip.graph_id else None
        job = models.ProblemJob(
            data=encoded(problem, self.chip),
            params=params,
            solver=models.SolverIdentity(name=self.chip.name, version=version),
            type="ising",
            label=label,
        )
        (reply,) = self._ask(lambda api: api.Problems, "submit_problems", [job]) or [None]
        if reply is None:
            raise ServiceError("the service answered a submission with nothing")
        if isinstance(reply, models.ProblemSubmitError):
            raise ServiceError(self._scrubbed(reply.error_msg), refused=True, fatal=True)
        return str(reply.id)

    def find(self, label: str) -> Status | None:
        """The live job with this very label, if there is one."""
        jobs = self._ask(lambda api: api.Problems, "list_problems", label=label)
        same = [_status(job) for job in jobs if job.label == label]
        live = [status for status in same if status.state not in ("FAILED", "CANCELLED")]
        return live[0] if live else None

    def status(self, job: str, wait: int = 0) -> Status:
        """The state of a job, after at most ``wait`` seconds if it is not final yet."""
        jobs = self._ask(lambda api: api.Problems, "get_problem_statuses", [job], timeout=wait)
        if not jobs or jobs[0].id != job:
            raise ServiceError(f"the service knows nothing of job {job}")
        return _status(jobs[0])

    def answer(self, job: str, problem: Programmed, num_reads: int) -> Answer:
        """The answer of a finished job, checked against the problem that was sent."""
        reply = self._ask(lambda api: api.Problems, "get_problem", job)
        if reply.id != job or reply.answer is None:
            raise ServiceError(f"the reply for job {job} holds no answer")
        return decoded(reply.answer.root.model_dump(), problem, num_reads)

    def limit(self, seconds: float) -> None:
        """Let requests of this thread take no longer than this from now on."""
        self._local.limit = seconds

    def cancel(self, job: str) -> None:
        self._ask(lambda api: api.Problems, "cancel_problem", job)

    def _ask(self, resource: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """One request; whatever goes wrong leaves as a :class:`ServiceError` that holds no token."""
        failure = None
        try:
            return getattr(self._resource(resource), method)(*args, **kwargs)
        except Exception as error:  # the client raises its own, requests', pydantic's and plain Python's
            failure = self._failure(error)
        raise failure  # outside of the handler: the client's exception carries the token in its request

    def _resource(self, resource: Any) -> Any:
        api = client_module("dwave.cloud.api")
        kind = resource(api)
        known: dict[Any, Any] = self._local.__dict__.setdefault("resources", {})
        if kind not in known:
            own = kind(
                endpoint=self.endpoint,
                timeout=self.request_timeout,
                retry={"total": 0, "redirect": 0},
                cache={"enabled": False, "home": None},
            )
            own.client.session.headers["X-Auth-Token"] = self._token  # not as a setting: those are logged
            own.client.session.max_redirects = 0
            known[kind] = own
        seconds = max(min(self.request_timeout, getattr(self._local, "limit", math.inf)), 0.01)
        for adapter in known[kind].client.session.adapters.values():
            adapter.timeout = seconds
        return known[kind]

    def _failure(self, error: Exception) -> ServiceError:
        exceptions = client_module("dwave.cloud.api.exceptions")
        refusals = (
            exceptions.ResourceBadRequestError,
            exceptions.ResourceAuthenticationError,
            exceptions.ResourceAccessForbiddenError,
            exceptions.ResourceNotFoundError,
        )
        fatal = isinstance(error, refusals[:3])
        refused = isinstance(error, (*refusals, exceptions.ResourceLimitsExceededError))
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        wait = str(headers.get("Retry-After", ""))
        return ServiceError(
            f"{type(error).__name__}: {self._scrubbed(str(error))}",
            refused=refused,
            fatal=fatal,
            retry_after=float(wait) if wait.isdigit() else 0.0,
        )

    def _scrubbed(self, text: str) -> str:
        return text.replace(self._token, "<token>")[:500]


def encoded(problem: Programmed, chip: Chip) -> dict[str, Any]:
    """The problem in D-Wave's ``qp`` format: all qubits, NaN where unused, then the couplers in use."""
    if not (np.isfinite(problem.h).all() and np.isfinite(problem.J).all()):
        raise ValueError("a bias or coupling is not finite; the service would take it for an unused qubit")
    linear = np.full(int(chip.properties["num_qubits"]), np.nan)
    linear[problem.qubits] = problem.h
    return {
        "format": "qp",
        "lin": base64.b64encode(linear[chip.qubits].astype("<f8").tobytes()).decode(),
        "quad": base64.b64encode(problem.J.astype("<f8").tobytes()).decode(),
        "offset": 0.0,
    }


def decoded(answer: dict[str, Any], problem: Programmed, num_reads: int) -> Answer:
    """An answer whose every part fits the problem; energies are computed again from what was sent."""
    try:
        qubits = np.frombuffer(base64.b64decode(answer["active_variables"], validate=True), "<i4")
        energies = np.frombuffer(base64.b64decode(answer["energies"], validate=True), "<f8")
        occurrences = np.frombuffer(base64.b64decode(answer["num_occurrences"], validate=True), "<i4")
        packed = np.frombuffer(base64.b64decode(answer["solutions"], validate=True), np.uint8)
        rows = packed.reshape(len(energies), -(-len(problem.qubits) // 8))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ServiceError(f"the answer cannot be read ({type(error).__name__}: {error})") from None
    bits = np.unpackbits(rows, axis=1)
    spins = (2 * bits[:, : len(problem.qubits)].astype(np.int8) - 1).astype(np.int8)
    scale = float(np.abs(problem.h).sum() + np.abs(problem.J).sum())
    checks = {
        "its qubits are not those of the problem": np.array_equal(qubits, problem.qubits),
        "its unused bits are set": not bits[:, len(problem.qubits) :].any(),
        "its numbers of reads do not add up": len(occurrences) == len(energies)
        and (occurrences > 0).all()
        and occurrences.sum() == num_reads,
        "its samples are not distinct": len(np.unique(rows, axis=0)) == len(rows),
        "its energies are not those of its samples": np.allclose(
            problem.energies(spins), energies, rtol=0, atol=1e-9 * max(scale, 1.0)
        ),
    }
    for complaint, holds in checks.items():
        if not holds:
            raise ServiceError(f"the answer was refused: {complaint}")
    charged = (answer.get("timing") or {}).get("qpu_access_time")
    known = isinstance(charged, int | float) and np.isfinite(charged) and charged >= 0
    return Answer(spins, occurrences.astype(np.int64), float(charged) if known else None)  # type: ignore[arg-type]


def _status(job: Any) -> Status:
    return Status(str(job.id), job.label, str(getattr(job.status, "value", job.status)))


def _settings(config_file: str | None, profile: str | None) -> dict[str, Any]:
    """D-Wave's settings from its files and environment, without the working directory's."""
    loaders = client_module("dwave.cloud.config")
    files: Any = config_file or os.environ.get("DWAVE_CONFIG_FILE")
    if not files:
        files = loaders.get_configfile_paths(local=False) or False
        if Path("dwave.conf").exists():
            warnings.warn(
                "dwave.conf in the working directory is not used: it could send your token elsewhere. "
                'Pass config_file="dwave.conf" if it is yours.',
                stacklevel=4,
            )
    before = logging.root.manager.disable
    logging.disable(logging.DEBUG)  # below that level the client writes down every setting, the token too
    try:
        return dict(loaders.load_config(config_file=files, profile=profile))
    finally:
        logging.disable(before)


def _named_solver(solver: Any) -> str | None:
    if isinstance(solver, dict):
        solver = solver.get("name")
    return str(solver) if solver and not str(solver).startswith("{") else None


def _checked_endpoint(endpoint: str | None, settings: dict[str, Any]) -> str:
    """An address that may see the token."""
    asked = endpoint is not None
    if endpoint is None:
        endpoint = settings.get("endpoint") or _regional_endpoint(settings)
    url = urlsplit(endpoint)
    host = url.hostname or ""
    loopback = host == "localhost" or _is_loopback(host)
    if url.scheme != "https" and not loopback:
        raise ValueError(f"the token goes over https alone, got the endpoint {endpoint!r}")
    followed = any(host == name or host.endswith(f".{name}") for name in FOLLOWED)
    if not (asked or loopback or followed):
        raise ValueError(
            f"the configuration sends the token to {host!r}, which is not D-Wave's; "
            f"pass endpoint={endpoint!r} if that is meant"
        )
    return endpoint


def _regional_endpoint(settings: dict[str, Any]) -> str:
    """The address of the configured region; the client would fall back to another without a word."""
    config = client_module("dwave.cloud.config")
    model = config.validate_config_v1({k: v for k, v in settings.items() if k != "token"})
    resolved = client_module("dwave.cloud.regions").resolve_endpoints(model)
    if model.region and resolved.region != model.region:
        raise ConnectionError(
            f"the address of region {model.region!r} could not be found; try again, or pass endpoint"
        )
    return str(resolved.endpoint)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _keep_out_of_logs(token: str) -> None:
    """Whatever D-Wave's client logs from here on, the token is not in it."""

    def scrub(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if token in message:
            record.msg, record.args = message.replace(token, "<token>"), ()
        return True

    client_module("dwave.cloud.api")
    for name in list(logging.Logger.manager.loggerDict):
        if name.split(".")[0] in ("dwave", "urllib3", "requests"):
            logging.getLogger(name).addFilter(scrub)
