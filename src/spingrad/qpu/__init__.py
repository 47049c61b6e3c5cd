"""Training on D-Wave QPUs: few calls per step, a plan before anything is paid, no step paid twice."""

from spingrad.qpu.chip import Chip
from spingrad.qpu.journal import BudgetError, Journal, JournalError
from spingrad.qpu.plan import Plan, plan
from spingrad.qpu.samples import load_samples, save_samples
from spingrad.qpu.service import QPUService, ServiceError
from spingrad.qpu.solver import REVERSE_SCHEDULE, QPUSolver
from spingrad.qpu.submission import StepError

__all__ = [
    "REVERSE_SCHEDULE",
    "BudgetError",
    "Chip",
    "Journal",
    "JournalError",
    "Plan",
    "QPUService",
    "QPUSolver",
    "ServiceError",
    "StepError",
    "load_samples",
    "plan",
    "save_samples",
]
