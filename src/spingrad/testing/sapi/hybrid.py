"""A hybrid solver: a binary quadratic model of any structure is uploaded in parts, then referred to."""

import base64
import hashlib
import io
import uuid
from dataclasses import dataclass, field
from typing import Any

import dimod
import numpy as np
from dwave.samplers import SimulatedAnnealingSampler

from spingrad.testing.sapi.chip import shown

NAME = "hybrid_binary_quadratic_model_emulated"
NUM_READS, NUM_SWEEPS = 20, 100  # of simulated annealing, of which the best read is the answer

PROPERTIES: dict[str, Any] = {
    "category": "hybrid",
    "supported_problem_types": ["bqm"],
    "parameters": {"time_limit": "as in D-Wave's documentation"},
    "version": "2.2",
    "maximum_number_of_variables": 1_000_000,
    "maximum_number_of_biases": 200_000_000,
    "maximum_time_limit_hrs": 24.0,
    "minimum_time_limit": [[1, 3.0], [1024, 3.0], [4096, 10.0], [10_000, 40.0], [1_000_000, 600.0]],
    "quota_conversion_rate": 20,
}
DEFINITION = {
    "identity": {"name": NAME},
    "status": "ONLINE",
    "description": "An emulated hybrid solver on this machine",
    "avg_load": 0.0,
    "properties": PROPERTIES,
}


@dataclass
class Upload:
    """The parts of one uploaded model, and all of them together once they were combined."""

    parts: dict[int, bytes] = field(default_factory=dict)
    content: bytes | None = None

    def to_dict(self) -> dict[str, Any]:
        """The state of the upload in the format of the API."""
        parts = [{"part_number": n, "checksum": _md5(part).hex()} for n, part in sorted(self.parts.items())]
        state = "UPLOAD_IN_PROGRESS" if self.content is None else "UPLOAD_COMPLETED"
        return {"status": state, "parts": parts}


@dataclass(frozen=True)
class Model:
    """A model that was uploaded and decoded."""

    bqm: dimod.BinaryQuadraticModel
    digest: str


class Hybrid:
    """Takes uploads, and answers with the best of some reads of simulated annealing.

    A job is answered at once, whatever its ``time_limit``, and charged for all of it: by the conversion rate,
    a second of hybrid time counts as a twentieth of a second of QPU time.
    """

    def __init__(self) -> None:
        self._uploads: dict[str, Upload] = {}

    def view(self, fields: str) -> bytes:
        """The definition as JSON, with the fields of the client's filter."""
        return shown(DEFINITION, fields)

    def begin(self) -> str:
        """The id of a new upload."""
        upload = str(uuid.uuid4())
        self._uploads[upload] = Upload()
        return upload

    def upload(self, upload: str) -> Upload | None:
        return self._uploads.get(upload)

    def put(self, upload: Upload, number: int, part: bytes, checksum: str | None) -> None:
        """Take one part, whose MD5 sum the client has sent along."""
        if checksum != base64.b64encode(_md5(part)).decode():
            raise ValueError(f"the checksum of part {number} does not match")
        upload.parts[number] = part

    def combine(self, upload: Upload, checksum: str) -> None:
        """Complete an upload; the checksum is that of the checksums of all parts."""
        parts = [part for _, part in sorted(upload.parts.items())]
        if checksum != _md5(b"".join(map(_md5, parts))).hex():
            raise ValueError("the combined checksum does not match")
        upload.content = b"".join(parts)

    def admit(self, body: dict[str, Any]) -> tuple[Model, float]:
        """Decode and check a problem; the model, and its cost in microseconds of QPU time.

        Raises:
            ValueError: The problem is refused; the message says why.
        """
        if body["type"] != "bqm" or body["data"]["format"] != "ref":
            raise ValueError(f"Unsupported problem type {body['type']!r}, expected an uploaded bqm")
        upload = self.upload(body["data"]["data"])
        if upload is None or upload.content is None:
            raise ValueError("Problem data does not exist or is incomplete")
        params = body.get("params") or {}
        for name in params:
            if name not in PROPERTIES["parameters"]:
                raise ValueError(f"Unknown parameter {name}")
        bqm = dimod.BinaryQuadraticModel.from_file(io.BytesIO(upload.content))
        if bqm.num_variables > PROPERTIES["maximum_number_of_variables"]:
            raise ValueError("The problem has too many variables")
        sizes, seconds = np.array(PROPERTIES["minimum_time_limit"]).T
        least = float(np.interp(bqm.num_variables, sizes, seconds))
        most = 3600 * PROPERTIES["maximum_time_limit_hrs"]
        if not least <= (limit := params.get("time_limit", least)) <= most:
            raise ValueError(f"time_limit must be between {least:g} and {most:g} seconds, got {limit!r}")
        digest = hashlib.sha256(upload.content).hexdigest()
        return Model(bqm, digest), 1e6 * limit / PROPERTIES["quota_conversion_rate"]

    def answer(self, model: Model, cost_us: float, rng: np.random.Generator) -> dict[str, Any]:
        """The best sample in the ``bq`` format."""
        seed = int(rng.integers(1, 2**31))
        samples = SimulatedAnnealingSampler().sample(
            model.bqm, num_reads=NUM_READS, num_sweeps=NUM_SWEEPS, seed=seed
        )
        best = samples.truncate(1, sorted_by="energy")
        charged = round(cost_us * PROPERTIES["quota_conversion_rate"])
        best.info.clear()
        best.info.update(run_time=charged, charge_time=charged, qpu_access_time=0)
        return {"format": "bq", "data": best.to_serializable()}


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
