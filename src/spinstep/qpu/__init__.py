"""D-Wave QPUs: a step packed into few calls, planned before it is paid, and paid once."""

from spinstep.qpu.chip import Chip
from spinstep.qpu.journal import BudgetError, Journal
from spinstep.qpu.plan import Plan, plan
from spinstep.qpu.service import QPUService, ServiceError
from spinstep.qpu.solver import QPUSolver
from spinstep.qpu.submission import StepError

__all__ = [
    "BudgetError",
    "Chip",
    "Journal",
    "Plan",
    "QPUService",
    "QPUSolver",
    "ServiceError",
    "StepError",
    "plan",
]
