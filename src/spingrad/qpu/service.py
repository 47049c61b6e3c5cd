"""D-Wave's web service through D-Wave's own client: single requests with a time limit, and a protected token.

The client's futures are not used. They retry and poll by their own rules, sometimes without end, and a
failed future does not tell whether the job was accepted. Here every request is made once, and
:mod:`~spingrad.qpu.submission` decides what follows.
"""

import base64
import ipaddress
import logging
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spingrad.qpu.chip import Chip, Ints, client_module
from spingrad.qpu.packing import Programmed, Spins

ROUNDING = 1e-6  # of an energy, relative to the sum of all biases: the service may use single precision
MOST_QUBITS, LARGEST_SIZE = 100_000, 64  # of a chip, well above today's 5,640 and 16
TRUSTED = ("dwavesys.com",)  # hosts to which a configuration may send the token


class ServiceError(Exception):
    """A request that failed.

    Args:
        message: The error of the service or of the network.
        refused: The request created no job for certain: the service refused it, or it was never sent.
        fatal: Trying again cannot help.
        retry_after: Seconds that the service asks to wait.

    Example:
        >>> from spingrad.testing.sapi import Sapi
        >>> with Sapi(size=4) as sapi, sapi.configured():
        ...     QPUService("Advantage_of_nobody")
        Traceback (most recent call last):
        spingrad.qpu.service.ServiceError: ResourceNotFoundError: Solver not found
    """

    def __init__(
        self, message: str, *, refused: bool = False, fatal: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.refused, self.fatal, self.retry_after = refused, fatal, retry_after


class AnswerError(ServiceError):
    """An answer that arrived but cannot belong to the problem that was sent."""


class Status(NamedTuple):
    """A job as the service lists it."""

    id: str
    label: str | None
    state: str


class Answer(NamedTuple):
    """Distinct samples in order of energy, how often each occurred, and the time that was charged."""

    spins: Spins  # (k, q), in the order of the problem's qubits
    occurrences: Ints  # (k,)
    charged_us: float | None


class Secret(str):
    """Text that is never shown in a ``repr`` and never copied to other processes."""

    def __repr__(self) -> str:
        return "'<token>'"

    def __reduce__(self) -> Any:
        raise TypeError("a token must not be pickled or copied; each process reads its own configuration")


class QPUService:
    """One QPU behind D-Wave's solver API.

    The constructor connects, and raises if no QPU can be reached.

    The token is read from ``DWAVE_API_TOKEN`` or from D-Wave's configuration file of the user or the system
    (``dwave config create``), never passed as an argument. A ``dwave.conf`` in the working directory is used
    only if ``config_file`` names it. Connections are encrypted unless they stay on this machine. Redirects
    are refused, because the client would send the token to the new address.

    The last argument of every request, ``within``, limits the seconds that it may take.

    Args:
        solver: Name of the QPU; by default that of the configuration, or the first that is online.
        endpoint: Address of the solver API; by default that of the configuration, or D-Wave's.
        config_file: Another configuration file.
        profile: Profile in the configuration file.
        request_timeout: Seconds that a single request may take, from the name of the host to the last byte.

    Example:
        >>> from spingrad.testing.sapi import Sapi
        >>> with Sapi(size=4) as sapi, sapi.configured():  # without this line, D-Wave's own service
        ...     service = QPUService()
        ...     service.solver, len(service.chip.qubits)
        ('Advantage_emulated', 261)
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
        settings = client_settings(config_file, profile)
        self._token = settings.pop("token")
        self.endpoint = _checked_endpoint(endpoint, settings, request_timeout)
        if not self._token:
            raise ValueError(
                "found no token for D-Wave's service: set DWAVE_API_TOKEN, or run `dwave config create` once"
            )
        _keep_out_of_logs(self._token)
        self.request_timeout = request_timeout
        self._sessions: dict[str, list[Any]] = {"Solvers": [], "Problems": []}  # those not in use
        self._under_way: set[Any] = set()  # connections with a request
        self.solver = solver or named_solver(settings.get("solver"))
        self.chip = self.fetch_chip()

    def __repr__(self) -> str:
        return f"QPUService(solver={self.solver!r}, endpoint={self.endpoint!r})"

    def fetch_chip(self, within: float = math.inf) -> Chip:
        """The QPU's current definition, requested from the service."""
        if self.solver is not None:
            return self._ask("Solvers", lambda api: _chip(api.get_solver(self.solver)), within)  # type: ignore[no-any-return]
        fields = "none,+identity,+status,+properties"
        found = self._ask("Solvers", lambda api: api.list_solvers(fields), within)
        online = [s for s in found if s.get("status") == "ONLINE" and s.properties.get("category") == "qpu"]
        if not online:
            raise RuntimeError(f"{self.endpoint} has no QPU online for this token")
        self.solver = online[0].identity.name
        return _chip(online[0])

    def submit(
        self,
        problem: Programmed,
        chip: Chip,
        label: str,
        params: dict[str, Any],
        within: float = math.inf,
    ) -> str:
        """Send a job and return its id; ``chip`` is the working graph that the problem was made for."""
        models = client_module("dwave.cloud.api.models")
        version = {"graph_id": chip.graph_id} if chip.graph_id else None
        job = models.ProblemJob(
            data=encoded(problem, chip),
            params=params,
            solver=models.SolverIdentity(name=chip.name, version=version),
            type="ising",
            label=label,
        )
        replies = self._ask("Problems", lambda api: api.submit_problems([job]), within)
        if len(replies) != 1:
            raise ServiceError(f"expected a reply for one job, got {len(replies)}")
        if isinstance(replies[0], models.ProblemSubmitError):
            code, message = replies[0].error_code, self._scrubbed(replies[0].error_msg)
            raise ServiceError(message, refused=True, fatal=_is_final(code))
        return _checked_id(replies[0].id)

    def find(self, label: str, within: float = math.inf) -> Status | None:
        """The job with exactly this label, if there is one."""
        jobs = self._ask("Problems", lambda api: api.list_problems(label=label), within)
        same = [_status(job) for job in jobs if job.label == label]
        return same[0] if same else None

    def status(self, job: str, wait: int = 0, within: float = math.inf) -> Status:
        """The state of a job; the service may wait up to ``wait`` seconds for the job to end."""
        ids = [_checked_id(job)]
        jobs = self._ask("Problems", lambda api: api.get_problem_statuses(ids, timeout=wait), within)
        if not jobs or jobs[0].id != job:
            raise ServiceError(f"the service does not know job {job}")
        return _status(jobs[0])

    def answer(
        self,
        job: str,
        problem: Programmed,
        num_reads: int,
        rounding: float = ROUNDING,
        within: float = math.inf,
    ) -> Answer:
        """The answer of a finished job, checked against the problem that was sent."""
        _checked_id(job)
        reply = self._ask("Problems", lambda api: _loaded(api, job), within)
        if not isinstance(reply, dict) or reply.get("id") != job or "answer" not in reply:
            raise AnswerError(f"the reply for job {job} holds no answer")
        return decoded(reply["answer"], problem, num_reads, rounding)

    def cancel(self, job: str, within: float = math.inf) -> None:
        """Cancel a job, if it has not begun."""
        _checked_id(job)
        self._ask("Problems", lambda api: api.cancel_problem(job), within)

    def interrupt(self) -> None:
        """Make all requests that are under way fail now, in whatever thread they were made."""
        for connection in list(self._under_way):
            connection.abort()

    def _ask(self, resource: str, request: Callable[[Any], Any], within: float) -> Any:
        """Make one request; every failure is raised as a :class:`ServiceError` without the token."""
        try:
            api, connection = self._sessions[resource].pop()  # a session serves one request at a time
        except IndexError:
            api, connection = self._new(resource)
        seconds = max(min(self.request_timeout, within), 0.01)
        for adapter in api.client.session.adapters.values():
            # After our own deadline; it ends the thread of a connection that does not come about.
            adapter.timeout = client_module("urllib3").Timeout(total=2 * seconds)
        outcome: list[Any] = []

        def ask() -> None:
            try:
                outcome.append(request(api))
            except Exception as error:  # of the client, requests, pydantic or Python itself
                outcome.append(self._failure(error))

        self._under_way.add(connection)
        try:
            done = connection.run(ask, seconds, api.close)
        finally:
            self._under_way.discard(connection)
        if not done:
            raise ServiceError(
                f"expected a complete reply of {self.endpoint} within {seconds:.3g} s, got none or only a "
                "part; the connection was closed. Check the network, or raise request_timeout",
                refused=not connection.was_open,
            )
        self._sessions[resource].append((api, connection))
        if isinstance(outcome[0], ServiceError):
            raise outcome[0]
        return outcome[0]

    def _new(self, resource: str) -> tuple[Any, Any]:
        api, connection = _session(resource, self.endpoint)
        api.client.session.headers["X-Auth-Token"] = self._token  # not as a setting, since those are logged
        return api, connection

    def _failure(self, error: Exception) -> ServiceError:
        if isinstance(error, ServiceError):
            return error
        response = getattr(error, "response", None)
        code = getattr(response, "status_code", 0)
        wait = str((getattr(response, "headers", None) or {}).get("Retry-After", ""))
        redirected = isinstance(error, client_module("requests").TooManyRedirects)
        unreadable = isinstance(error, client_module("spingrad.qpu.transport").ReplyError)
        return ServiceError(
            f"{type(error).__name__}: {self._scrubbed(str(error))}"
            + ("; redirects are not followed, since they would receive the token" if redirected else ""),
            refused=(400 <= code < 500 and code != 408) or _never_left(error),
            fatal=redirected or _is_final(code) or unreadable,
            retry_after=float(wait) if wait.isascii() and wait.isdigit() else 0.0,
        )

    def _scrubbed(self, text: str) -> str:
        return str(text).replace(self._token, "<token>")[:500]


def _is_final(code: int) -> bool:
    """Whether a request with this HTTP status would fail again."""
    return 400 <= code < 500 and code not in (404, 408, 409, 425, 429)


def _never_left(error: Exception) -> bool:
    """Whether the request was never sent because there was no connection."""
    failures = client_module("urllib3.exceptions")
    never = (failures.NewConnectionError, failures.ConnectTimeoutError)
    return bool(client_module("dwave.cloud.utils.exception").is_caused_by(error, never))


def _loaded(problems: Any, job: str) -> Any:
    """A job with its answer as plain JSON; the client's model would demand parts that are not needed."""
    kind = {"media_type": "application/vnd.dwave.sapi.problem+json", "accept_version": "~=3.0"}
    problems.session.set_accept(ask_version="3.0.0", **kind)
    try:
        return problems.session.get(job).json()
    finally:
        problems.session.unset_accept()


def _checked_id(job: str) -> str:
    """Check that an id consists of plain characters, so that it cannot change the address of a request."""
    if not re.fullmatch(r"[\w-]{1,100}", str(job)):
        raise ServiceError(f"{str(job)[:100]!r} is not a valid id of a job")
    return str(job)


def encoded(problem: Programmed, chip: Chip) -> dict[str, Any]:
    """The problem in D-Wave's ``qp`` format: all qubits, NaN for unused ones, then the used couplers."""
    if not (np.isfinite(problem.h).all() and np.isfinite(problem.J).all()):
        raise ValueError("a bias or coupling is not finite; the service would treat it as an unused qubit")
    linear = np.full(int(chip.properties["num_qubits"]), np.nan)
    linear[problem.qubits] = problem.h
    return {
        "format": "qp",
        "lin": base64.b64encode(linear[chip.qubits].astype("<f8").tobytes()).decode(),
        "quad": base64.b64encode(problem.J.astype("<f8").tobytes()).decode(),
        "offset": 0.0,
    }


def decoded(answer: Any, problem: Programmed, num_reads: int, rounding: float = ROUNDING) -> Answer:
    """Decode an answer and check every part of it; energies are recomputed from the problem that was sent."""
    try:
        qubits, energies, occurrences, packed = (
            np.frombuffer(base64.b64decode(answer[name], validate=True), dtype)
            for name, dtype in (
                ("active_variables", "<i4"),
                ("energies", "<f8"),
                ("num_occurrences", "<i4"),
                ("solutions", "u1"),
            )
        )
        samples = packed.reshape(len(energies), -(-len(problem.qubits) // 8))
        known_format = answer["format"] == "qp"
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"the answer cannot be read ({type(error).__name__}: {error})") from None
    _check(
        {
            "its format is unknown": known_format,
            "its qubits are not those of the problem": np.array_equal(qubits, problem.qubits),
            "its numbers of reads do not add up": len(occurrences) == len(energies)
            and (occurrences > 0).all()
            and occurrences.sum(dtype=np.int64) == num_reads,
        }
    )
    # Only now are the samples unpacked, which takes many times their size.
    bits = np.unpackbits(samples, axis=1)
    spins = (2 * bits[:, : len(problem.qubits)].astype(np.int8) - 1).astype(np.int8)
    scale = float(np.abs(problem.h).sum() + np.abs(problem.J).sum())
    _check(
        {
            "its unused bits are set": not bits[:, len(problem.qubits) :].any(),
            "its samples are not distinct": len(np.unique(samples, axis=0)) == len(samples),
            "its energies are not those of its samples": np.allclose(
                problem.energies(spins), energies, rtol=0, atol=rounding * max(scale, 1.0)
            ),
        }
    )
    return Answer(spins, occurrences.astype(np.int64), _charged(answer.get("timing")))


def _check(holds: dict[str, Any]) -> None:
    for complaint, good in holds.items():
        if not good:
            raise AnswerError(f"the answer was rejected: {complaint}")


def _charged(timing: Any) -> float | None:
    """The time that was charged, if its reported parts add up to it."""
    try:
        total, *parts = (float(timing[f"qpu_{part}_time"]) for part in ("access", "programming", "sampling"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return total if total >= 0 and abs(total - sum(parts)) <= 1.0 else None


def _chip(definition: Any) -> Chip:
    version = definition.identity.version
    chip = Chip(definition.identity.name, version and version.graph_id, definition.properties)
    try:
        total, qubits, couplers = int(chip.properties["num_qubits"]), chip.qubits, chip.couplers
        usable = len(qubits) > 0 and np.isin(couplers, qubits).all() and chip.size <= LARGEST_SIZE
        usable = usable and qubits.min() >= 0 and qubits.max() < total <= MOST_QUBITS
    except (LookupError, TypeError, ValueError, OverflowError):
        usable = False
    if not usable:
        raise ServiceError(
            f"expected the definition of a QPU with at most {MOST_QUBITS} qubits, got something else for "
            f"{str(chip.name)[:100]!r}; check the names of the solver and the endpoint",
            fatal=True,
        )
    return chip


def _status(job: Any) -> Status:
    return Status(_checked_id(job.id), job.label, str(getattr(job.status, "value", job.status)))


def client_settings(config_file: str | None, profile: str | None) -> dict[str, Any]:
    """D-Wave's settings from its files and the environment, ignoring files in the working directory."""
    loaders = client_module("dwave.cloud.config")
    files: Any = config_file or os.environ.get("DWAVE_CONFIG_FILE")
    if not files:
        files = loaders.get_configfile_paths(local=False) or False
        if Path("dwave.conf").exists():
            warnings.warn(
                "dwave.conf in the working directory is ignored: it could send your token to another host. "
                'Pass config_file="dwave.conf" if you trust it.',
                stacklevel=4,
            )
    before = logging.root.manager.disable
    # At debug level the client logs every setting, including the token.
    logging.disable(max(before, logging.DEBUG))
    try:
        settings = dict(loaders.load_config(config_file=files, profile=profile))
    finally:
        logging.disable(before)
    return settings | {"token": Secret(settings.get("token") or "")}


def named_solver(solver: Any) -> str | None:
    if isinstance(solver, dict):
        solver = solver.get("name")
    return str(solver) if solver and not str(solver).startswith("{") else None


def _checked_endpoint(endpoint: str | None, settings: dict[str, Any], seconds: float = 60.0) -> str:
    """Check that the token may be sent to this address, which takes at most so many seconds to find."""
    given = endpoint is not None
    if endpoint is None:
        endpoint = settings.get("endpoint") or _regional_endpoint(settings, seconds)
    scheme, host = _place(endpoint)
    loopback = _is_loopback(host)
    if not (scheme == "https" or (scheme == "http" and loopback)):
        raise ValueError(f"the token is sent only over https, got the endpoint {endpoint!r}")
    trusted = any(host == name or host.endswith(f".{name}") for name in TRUSTED)
    if not (given or loopback or trusted):
        raise ValueError(
            f"the configuration would send the token to {host!r}, which is not a host of D-Wave; "
            f"pass endpoint={endpoint!r} if that is intended"
        )
    return endpoint


def _regional_endpoint(settings: dict[str, Any], seconds: float) -> str:
    """The address of the configured region; the client would silently fall back to another region."""
    config, constants = client_module("dwave.cloud.config"), client_module("dwave.cloud.config.constants")
    model = config.validate_config_v1({k: v for k, v in settings.items() if k != "token"})
    region = model.region or constants.DEFAULT_REGION
    directory = model.metadata_api_endpoint or constants.DEFAULT_METADATA_API_ENDPOINT
    standard = (constants.DEFAULT_REGION, constants.DEFAULT_METADATA_API_ENDPOINT)
    if model.leap_api_endpoint or (region, directory) == standard:
        return str(client_module("dwave.cloud.regions").resolve_endpoints(model).endpoint)
    api, connection = _session("Regions", directory)
    found: dict[str, str] = {}

    def look_up() -> None:
        with suppress(Exception):  # of the client, requests, pydantic or Python itself
            found.update((known.code, str(known.solver_api_endpoint)) for known in api.list_regions())

    if connection.run(look_up, seconds, api.close):
        api.close()
    if region not in found:
        raise ConnectionError(
            f"the address of region {region!r} could not be found at {directory} within {seconds:.3g} s; try "
            "again, or pass endpoint"
        )
    return found[region]


def _session(resource: str, endpoint: str) -> tuple[Any, Any]:
    """A session of D-Wave's client for one kind of requests, and the connection that makes them."""
    api = getattr(client_module("dwave.cloud.api"), resource)(
        endpoint=endpoint,
        retry={"total": 0, "redirect": 0},
        cache={"enabled": False, "home": None},
        compress_qpu_problem_data=True,
    )
    session = api.client.session
    session.max_redirects = 0
    session.trust_env = not _is_loopback(_place(endpoint)[1])  # no proxy on this machine
    return api, client_module("spingrad.qpu.transport").bound(session)


def _place(endpoint: str) -> tuple[str, str]:
    """Scheme and host, by the client's own parser: parsers disagree about malicious addresses."""
    url = client_module("urllib3.util").parse_url(endpoint)
    return str(url.scheme), str(url.host or "").strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_tokens: set[str] = set()
_CLIENTS = "dwave", "urllib3", "requests"


def _keep_out_of_logs(token: Secret) -> None:
    """Remove the token from everything that D-Wave's client logs from now on.

    Records are changed where they are made: a filter of a logger does not see those of loggers below it, and
    the client makes some of its loggers late.
    """
    if not _tokens:
        make = logging.getLogRecordFactory()

        def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            return _scrubbed(record) if record.name.split(".")[0] in _CLIENTS else record

        logging.setLogRecordFactory(made)
    _tokens.add(token)


def _scrubbed(record: logging.LogRecord) -> logging.LogRecord:
    message = scrubbed = record.getMessage()
    for token in _tokens:
        scrubbed = scrubbed.replace(token, "<token>")
    if scrubbed != message:
        record.msg, record.args = scrubbed, ()
    return record
