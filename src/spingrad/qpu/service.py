"""D-Wave's web service, through D-Wave's own client: single requests that end, and a token that stays here.

The client's futures are not used. They retry and poll by rules of their own, some without end, and a
failed one does not tell whether the job was accepted; here every request is made once, and
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spingrad.qpu.chip import Chip, Ints, client_module
from spingrad.qpu.packing import Programmed, Spins

ROUNDING = 1e-6  # of an energy, relative to the sum of all biases: a service may use single precision
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


class AnswerError(ServiceError):
    """An answer that arrived, but cannot be one of the problem that was sent."""


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


class Secret(str):
    """Text that is sent, but neither shown nor copied to other processes."""

    def __repr__(self) -> str:
        return "'<token>'"

    def __reduce__(self) -> Any:
        raise TypeError("a token is not pickled or copied; let each process read its own configuration")


class QPUService:
    """One QPU behind D-Wave's solver API.

    The token comes from ``DWAVE_API_TOKEN`` or from D-Wave's configuration file of the user or the system
    (``dwave config create``), never from an argument. A ``dwave.conf`` in the working directory is obeyed
    only if it is named. Connections are encrypted unless they stay on this machine, and redirects are
    refused: the client would send the token along.

    Every request takes a last argument, the seconds within which it has to end.

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
        self._token = settings.pop("token")
        self.endpoint = _checked_endpoint(endpoint, settings)
        if not self._token:
            raise ValueError(
                "no token for D-Wave's service: set DWAVE_API_TOKEN, or run `dwave config create` once"
            )
        _keep_out_of_logs(self._token)
        self.request_timeout = request_timeout
        self._idle: dict[str, list[Any]] = {"Solvers": [], "Problems": []}
        self.solver = solver or _named_solver(settings.get("solver"))
        self.chip = self.fetch_chip()

    def __repr__(self) -> str:
        return f"QPUService(solver={self.solver!r}, endpoint={self.endpoint!r})"

    def fetch_chip(self, within: float = math.inf) -> Chip:
        """The QPU's definition as it is now; asks the service."""
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
        """Send a job for a chip as it was when the problem was made, and return its id."""
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
            raise ServiceError(f"one job was sent, the service speaks of {len(replies)}")
        if isinstance(replies[0], models.ProblemSubmitError):
            code, message = replies[0].error_code, self._scrubbed(replies[0].error_msg)
            raise ServiceError(message, refused=True, fatal=_is_final(code))
        return _checked_id(replies[0].id)

    def find(self, label: str, within: float = math.inf) -> Status | None:
        """The job with this very label, if there is one."""
        jobs = self._ask("Problems", lambda api: api.list_problems(label=label), within)
        same = [_status(job) for job in jobs if job.label == label]
        return same[0] if same else None

    def status(self, job: str, wait: int = 0, within: float = math.inf) -> Status:
        """The state of a job, after at most ``wait`` seconds if it is not final yet."""
        ids = [_checked_id(job)]
        jobs = self._ask("Problems", lambda api: api.get_problem_statuses(ids, timeout=wait), within)
        if not jobs or jobs[0].id != job:
            raise ServiceError(f"the service knows nothing of job {job}")
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
        """Withdraw a job, if it has not begun."""
        _checked_id(job)
        self._ask("Problems", lambda api: api.cancel_problem(job), within)

    def _ask(self, resource: str, request: Callable[[Any], Any], within: float) -> Any:
        """One request; whatever goes wrong leaves as a :class:`ServiceError` that holds no token."""
        try:
            api = self._idle[resource].pop()  # a session serves one thread at a time
        except IndexError:
            api = self._new(resource)
        timeout = client_module("urllib3").Timeout(total=max(min(self.request_timeout, within), 0.01))
        for adapter in api.client.session.adapters.values():
            adapter.timeout = timeout
        try:
            return request(api)
        except Exception as error:  # the client raises its own, requests', pydantic's and plain Python's
            failure = self._failure(error)
        finally:
            self._idle[resource].append(api)
        raise failure  # outside of the handler: the client's exception carries the token in its request

    def _new(self, resource: str) -> Any:
        api = getattr(client_module("dwave.cloud.api"), resource)(
            endpoint=self.endpoint,
            retry={"total": 0, "redirect": 0},
            cache={"enabled": False, "home": None},
            compress_qpu_problem_data=True,
        )
        session = api.client.session
        session.headers["X-Auth-Token"] = self._token  # not as a setting: those are logged
        session.max_redirects = 0
        session.trust_env = not _is_loopback(_place(self.endpoint)[1])  # no proxy between us and this machine
        return api

    def _failure(self, error: Exception) -> ServiceError:
        response = getattr(error, "response", None)
        code = getattr(response, "status_code", 0)
        wait = str((getattr(response, "headers", None) or {}).get("Retry-After", ""))
        redirected = isinstance(error, client_module("requests").TooManyRedirects)
        return ServiceError(
            f"{type(error).__name__}: {self._scrubbed(str(error))}"
            + (", and redirects are not followed: they would take the token elsewhere" if redirected else ""),
            refused=(400 <= code < 500 and code != 408) or _never_left(error),
            fatal=redirected or _is_final(code),
            retry_after=float(wait) if wait.isascii() and wait.isdigit() else 0.0,
        )

    def _scrubbed(self, text: str) -> str:
        return str(text).replace(self._token, "<token>")[:500]


def _is_final(code: int) -> bool:
    """Whether a request with this status would get the same again."""
    return 400 <= code < 500 and code not in (404, 408, 409, 425, 429)


def _never_left(error: Exception) -> bool:
    """Whether there was no connection that a request could have gone through."""
    failures = client_module("urllib3.exceptions")
    never = (failures.NewConnectionError, failures.ConnectTimeoutError)
    return bool(client_module("dwave.cloud.utils.exception").is_caused_by(error, never))


def _loaded(problems: Any, job: str) -> Any:
    """A job with its answer as it came: the client's own model insists on parts that we can do without."""
    kind = {"media_type": "application/vnd.dwave.sapi.problem+json", "accept_version": "~=3.0"}
    problems.session.set_accept(ask_version="3.0.0", **kind)
    try:
        return problems.session.get(job).json()
    finally:
        problems.session.unset_accept()


def _checked_id(job: str) -> str:
    """An id that names a job, and not another address."""
    if not re.fullmatch(r"[\w-]{1,100}", str(job)):
        raise ServiceError(f"{str(job)[:100]!r} is no id of a job")
    return str(job)


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


def decoded(answer: Any, problem: Programmed, num_reads: int, rounding: float = ROUNDING) -> Answer:
    """An answer whose every part fits the problem; energies are computed again from what was sent."""
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
        rows = packed.reshape(len(energies), -(-len(problem.qubits) // 8))
        known_format = answer["format"] == "qp"
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"the answer cannot be read ({type(error).__name__}: {error})") from None
    bits = np.unpackbits(rows, axis=1)
    spins = (2 * bits[:, : len(problem.qubits)].astype(np.int8) - 1).astype(np.int8)
    scale = float(np.abs(problem.h).sum() + np.abs(problem.J).sum())
    checks = {
        "its format is unknown": known_format,
        "its qubits are not those of the problem": np.array_equal(qubits, problem.qubits),
        "its unused bits are set": not bits[:, len(problem.qubits) :].any(),
        "its numbers of reads do not add up": len(occurrences) == len(energies)
        and (occurrences > 0).all()
        and occurrences.sum(dtype=np.int64) == num_reads,
        "its samples are not distinct": len(np.unique(rows, axis=0)) == len(rows),
        "its energies are not those of its samples": np.allclose(
            problem.energies(spins), energies, rtol=0, atol=rounding * max(scale, 1.0)
        ),
    }
    for complaint, holds in checks.items():
        if not holds:
            raise AnswerError(f"the answer was refused: {complaint}")
    return Answer(spins, occurrences.astype(np.int64), _charged(answer.get("timing")))


def _charged(timing: Any) -> float | None:
    """The time that was charged, if its parts add up to it."""
    try:
        total, *parts = (float(timing[f"qpu_{part}_time"]) for part in ("access", "programming", "sampling"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return total if total >= 0 and abs(total - sum(parts)) <= 1.0 else None


def _chip(definition: Any) -> Chip:
    version = definition.identity.version
    return Chip(definition.identity.name, version and version.graph_id, definition.properties)


def _status(job: Any) -> Status:
    return Status(_checked_id(job.id), job.label, str(getattr(job.status, "value", job.status)))


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
    # Below that level the client writes down every setting, the token too.
    logging.disable(max(before, logging.DEBUG))
    try:
        settings = dict(loaders.load_config(config_file=files, profile=profile))
    finally:
        logging.disable(before)
    return settings | {"token": Secret(settings.get("token") or "")}


def _named_solver(solver: Any) -> str | None:
    if isinstance(solver, dict):
        solver = solver.get("name")
    return str(solver) if solver and not str(solver).startswith("{") else None


def _checked_endpoint(endpoint: str | None, settings: dict[str, Any]) -> str:
    """An address that may see the token."""
    asked = endpoint is not None
    if endpoint is None:
        endpoint = settings.get("endpoint") or _regional_endpoint(settings)
    scheme, host = _place(endpoint)
    loopback = _is_loopback(host)
    if not (scheme == "https" or (scheme == "http" and loopback)):
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


def _place(endpoint: str) -> tuple[str, str]:
    """Scheme and host as the client will read them: parsers differ over addresses made to deceive."""
    url = client_module("urllib3.util").parse_url(endpoint)
    return str(url.scheme), str(url.host or "").strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_tokens: set[str] = set()


def _keep_out_of_logs(token: Secret) -> None:
    """Whatever D-Wave's client logs from here on, the token is not in it."""
    _tokens.add(token)
    client_module("dwave.cloud")
    for name in list(logging.Logger.manager.loggerDict):
        if name.split(".")[0] in ("dwave", "urllib3", "requests"):
            logging.getLogger(name).addFilter(_scrub)


def _scrub(record: logging.LogRecord) -> bool:
    message = scrubbed = record.getMessage()
    for token in _tokens:
        scrubbed = scrubbed.replace(token, "<token>")
    if scrubbed != message:
        record.msg, record.args = scrubbed, ()
    return True
