"""Refuses problems and parameters that the chip's definition does not allow."""

from itertools import pairwise
from typing import Any

import numpy as np

from spingrad.testing.sapi.annealer import UNUSED, Annealer, is_reverse
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
    if params.get("fast_anneal") and problem.to_ising()[0].any():
        raise ValueError("fast_anneal needs biases h of zero; flux_biases take their place")
    if "initial_state" in params:
        _check_start(params["initial_state"], problem, chip)
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
    duration = "fast_anneal_time" if params.get("fast_anneal") else "annealing_time"
    for name, value in params.items():
        if name not in chip.properties["parameters"] and not name.startswith("x_"):
            raise ValueError(f"Unknown parameter {name}")
        limited = duration if name == "annealing_time" else name
        if f"{limited}_range" in chip.properties:
            _check_range(limited, value, chip)
    if "anneal_schedule" in params:
        _check_schedule(params["anneal_schedule"], duration, chip)
    if is_reverse(params) != ("initial_state" in params):
        raise ValueError(
            "reverse annealing needs both an initial_state and an anneal_schedule that begins at s = 1"
        )
    if not isinstance(params.get("num_reads", 1), int):
        raise ValueError(f"num_reads must be an integer, got {params['num_reads']!r}")
    if params.get("answer_mode", "histogram") not in ("histogram", "raw"):
        raise ValueError(f"answer_mode must be histogram or raw, got {params['answer_mode']!r}")


def _check_schedule(schedule: Any, duration: str, chip: Chip) -> None:
    """The rules of D-Wave's documentation for the points ``[time, s]`` of a schedule."""
    fast, shortest = duration == "fast_anneal_time", chip.properties[f"{duration}_range"][0]
    most = 2 if fast else chip.properties["max_anneal_schedule_points"]  # a fast anneal is a straight line
    points = np.array(schedule, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or not 2 <= len(points) <= most:
        raise ValueError(f"anneal_schedule must have 2 to {most} points [time, s], got {schedule!r}")
    times, s = points.T
    rules = {
        "must consist of finite numbers": np.isfinite(points).all(),
        "must begin at time 0": times[0] == 0,
        "must have increasing times": (np.diff(times) > 0).all(),
        "must keep s between 0 and 1": ((s >= 0) & (s <= 1)).all(),
        "must begin at s = 0, or at s = 1 for reverse annealing": s[0] in (0, 1),
        "must begin at s = 0 in a fast anneal": s[0] == 0 or not fast,
        "must end at s = 1": s[-1] == 1,
        "must not let s decrease in a forward anneal": s[0] == 1 or (np.diff(s) >= 0).all(),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"anneal_schedule {rule}, got {schedule!r}")
    _check_range(duration, times[-1], chip)
    steepest = max(abs(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points.tolist()))
    if round(steepest, 10) > 1 / shortest:
        raise ValueError(f"anneal_schedule must not be steeper than {1 / shortest:g} per microsecond")


def _check_start(state: Any, problem: Problem, chip: Chip) -> None:
    """One value for each qubit of the chip, 3 for an unused one."""
    values = problem.values
    num_qubits = chip.properties["num_qubits"]
    if not isinstance(state, list) or len(state) != num_qubits:
        raise ValueError(f"initial_state must be a list of {num_qubits} values, one per qubit")
    if not set(state) <= {*values, UNUSED}:
        raise ValueError(f"initial_state of this problem may hold {values[0]}, {values[1]} and {UNUSED}")
    if any(state[qubit] == UNUSED for qubit in problem.qubits):
        raise ValueError("initial_state must have a value for every qubit of the problem")


def _check_range(name: str, value: Any, chip: Chip) -> None:
    low, high = chip.properties[f"{name}_range"]
    if isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")
