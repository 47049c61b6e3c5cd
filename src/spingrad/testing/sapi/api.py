"""The REST resources of the solver API that D-Wave's client requests."""

import json
import random
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeVar

from spingrad.testing.sapi.faults import mutated
from spingrad.testing.sapi.hybrid import NAME, Upload
from spingrad.testing.sapi.service import Job, Service

T = TypeVar("T")


class NotFoundError(LookupError):
    """Becomes a 404."""


@dataclass(frozen=True)
class HTTPRequest:
    """The parts of an HTTP request that the API needs."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Message
    body: bytes

    @property
    def stage(self) -> str:
        """The stage of a job that the request belongs to."""
        match self.path, self.method:
            case ("solvers", *_), _:
                return "solvers"
            case ("bqm", *_), _:
                return "upload"
            case ("problems", *_), "POST":
                return "submit"
            case ("problems", *_), "DELETE":
                return "cancel"
            case ("problems", _, *_), _:
                return "load"
            case ("problems",), _:
                return "poll" if "id" in self.query else "list"
        return "other"

    @property
    def subject(self) -> str:
        """The label or the id that the request names, if any."""
        if self.stage == "submit":
            with suppress(AttributeError, TypeError, ValueError, zlib.error):
                problems = self.json()
                return ",".join(str(problem.get("label", "")) for problem in problems)
        named = "".join(self.path[1:2]) if self.stage in ("load", "cancel") else ""
        return self.query.get("id") or self.query.get("label") or named

    @property
    def media(self) -> str:
        """The media type that the client accepts in the reply."""
        if self.stage == "upload":
            return "application/json"
        match self.path:
            case ("solvers", _):
                name = "solver-definition-list"
            case ("solvers", *_):
                name = "solver-definition"
            case (_, _, "info"):
                name = "problem-data"
            case (_, _, "answer"):
                name = "problem-answer"
            case (_, _, "messages"):
                name = "problem-message"
            case (_, _):
                name = "problem"
            case _:
                name = "problems"
        return f"application/vnd.dwave.sapi.{name}+json; version=3.0.0"

    def json(self) -> Any:
        deflated = self.headers.get("Content-Encoding") == "deflate"
        return json.loads(zlib.decompress(self.body) if deflated else self.body)


@dataclass(frozen=True)
class Reply:
    body: bytes
    media: str = "application/json"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def failure(code: int, message: str) -> Reply:
    return Reply(json.dumps({"error_code": code, "error_msg": message}).encode(), code=code)


class Api:
    """Answers requests, independently of sockets.

    Args:
        service: The service behind the API.
        token: The only token that is accepted.
    """

    def __init__(self, service: Service, token: str) -> None:
        self.service = service
        self.token = token

    def respond(self, request: HTTPRequest) -> Reply:
        if request.headers.get("X-Auth-Token") != self.token:
            return failure(401, "Invalid token or access denied")
        try:
            return Reply(self._body(request), request.media)
        except NotFoundError as error:
            return failure(404, str(error))
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            return failure(400, f"bad request: {error!r}")

    def _body(self, request: HTTPRequest) -> bytes:
        match request.method, request.path:
            case "GET", ("solvers", "remote", *name):
                return self._solvers(name, request.query.get("filter", "all"))
            case "GET", ("problems", job_id, *part):
                self.service.wait([job_id], float(request.query.get("timeout", 0)))
                return self._part(_known(self.service.job(job_id)), part)
            case "GET", ("problems",):
                return _encode([job.to_dict() for job in self._jobs(request.query)])
            case "POST", ("problems",):
                return self._submit(request.json())
            case "DELETE", ("problems",):
                return _encode([self._cancel(job_id) for job_id in request.json()])
            case "DELETE", ("problems", job_id):
                return _encode(_known(self.service.cancel(job_id)).to_dict())
            case "POST", ("bqm", "multipart"):
                return _encode({"id": self.service.hybrid.begin()})
            case _, ("bqm", "multipart", upload, *part):
                return _encode(self._upload(request, _known(self.service.hybrid.upload(upload)), part))
        raise NotFoundError("no such resource")

    def _solvers(self, name: list[str], fields: str) -> bytes:
        chip, hybrid = self.service.annealer.chip, self.service.hybrid
        views = {chip.identity["name"]: chip.view(fields), NAME: hybrid.view(fields)}
        if not name:
            return b"[" + b",".join(views.values()) + b"]"
        if name[0] not in views:
            raise NotFoundError("Solver not found")
        return views[name[0]]

    def _upload(self, request: HTTPRequest, upload: Upload, part: list[str]) -> dict[str, Any]:
        match request.method, part:
            case "GET", ["status"]:
                return upload.to_dict()
            case "PUT", ["part", number]:
                self.service.hybrid.put(upload, int(number), request.body, request.headers.get("Content-MD5"))
                return {}
            case "POST", ["combine"]:
                self.service.hybrid.combine(upload, request.json()["checksum"])
                return {}
        raise NotFoundError("no such part of an upload")

    def _submit(self, problems: Any) -> bytes:
        if isinstance(problems, list):
            return _encode([self.service.submit(problem) for problem in problems])
        return _encode(self.service.submit(problems))

    def _cancel(self, job_id: str) -> dict[str, Any]:
        job = self.service.cancel(job_id)
        return job.to_dict() if job else {"error_code": 404, "error_msg": "Problem not found"}

    def _jobs(self, query: Mapping[str, str]) -> list[Job]:
        if "id" in query:
            return self.service.wait(query["id"].split(","), float(query.get("timeout", 0)))
        limit = int(query.get("max_results", 1000))
        return self.service.find(query.get("label"), query.get("status"), query.get("solver"), limit)

    def _part(self, job: Job, part: list[str]) -> bytes:
        match part:
            case []:
                return self._with_answer(job, job.to_dict())
            case ["info"]:
                return self._with_answer(job, _info(job))
            case ["answer"] if job.answer is not None:
                return self._with_answer(job, {})
            case ["messages"]:
                return b"[]"
        raise NotFoundError("no such part of a problem")

    def _with_answer(self, job: Job, envelope: dict[str, Any]) -> bytes:
        """The envelope and the job's answer, if it has one; a fault in transit may damage the answer."""
        if job.answer is None:
            return _encode(envelope)
        fault = self.service.faults.take("transit") if job.is_qpu else None
        if fault is None:
            return _encode({**envelope, "answer": job.answer})
        if fault.kind == "mutate":
            return mutated(_encode({**envelope, "answer": job.answer}), random.Random(fault.seed))
        return _encode({**envelope, "answer": fault.damaged(job.answer)})


def _known(found: T | None) -> T:
    if found is None:
        raise NotFoundError("Problem not found")
    return found


def _info(job: Job) -> dict[str, Any]:
    metadata = {**job.to_dict(), "submitted_by": "emulator", "messages": []}
    return {"id": job.id, "data": job.body["data"], "params": job.params, "metadata": metadata}


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()
