"""Refuses problems and parameters that the chip's definition does not allow."""

from typing import Any

from spingrad.testing.sapi.annealer import Annealer
from spingrad.testing.sapi.chip import Chip
from spingrad.testing.sapi.wire import Problem, decode_problem

ROUNDING = 1e-9  # DWaveCliqueSampler scales problems exactly to the limit of a range


def admit(body: dict[str, Any], annealer: Annealer) -> tuple[Problem, float]:
    """Decode and check a problem.

    Returns:
        The problem and its cost in microseconds.

    Raises:
        ValueError: The problem is refused; the message says why.
    """
    chip, params = annealer.chip, body.get("params") or {}
    _check_solver(body, chip)
    _check_params(params, chip)
    problem = decode_problem(body["type"], body["data"], chip)
    if not params.get("auto_scale", True) and annealer.fill(problem) > 1 + ROUNDING:
        raise ValueError("h or J is out of range, and auto_scale is off")
    cost_us = chip.access_time(len(problem.qubits), params)
    _check_range("problem_run_duration", cost_us, chip)
    return problem, cost_us


def _check_solver(body: dict[str, Any], chip: Chip) -> None:
    solver = body["solver"]
    if solver["name"] != chip.identity["name"] or chip.definition["status"] != "ONLINE":
        raise ValueError("Solver does not exist or is offline")
    if solver.get("version") not in (None, chip.identity["version"]):
        raise ValueError("Solver working graph has changed")
    if body["type"] not in chip.properties["supported_problem_types"]:
        raise ValueError(f"Unsupported problem type {body['type']!r}")


def _check_params(params: dict[str, Any], chip: Chip) -> None:
    for name, value in params.items():
        if name not in chip.properties["parameters"] and not name.startswith("x_"):
            raise ValueError(f"Unknown parameter {name}")
        if f"{name}_range" in chip.properties:
            _check_range(name, value, chip)
    if "anneal_schedule" in params:
        _check_range("annealing_time", params["anneal_schedule"][-1][0], chip)
    if not isinstance(params.get("num_reads", 1), int):
        raise ValueError(f"num_reads must be an integer, got {params['num_reads']!r}")
    if params.get("answer_mode", "histogram") not in ("histogram", "raw"):
        raise ValueError(f"answer_mode must be histogram or raw, got {params['answer_mode']!r}")


def _check_range(name: str, value: Any, chip: Chip) -> None:
    low, high = chip.properties[f"{name}_range"]
    if isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")
