"""Who takes a step: one process, the ranks of a torch engine, or ranks that vote."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spingrad._version import __version__
from spingrad.distributed.bits import pack, packed_size, unpack
from spingrad.distributed.handshake import (
    Facts,
    agree,
    compare,
    differ,
    digest,
    explain,
    facts_of,
    failure,
    fingerprints,
    names_of,
)
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire
from spingrad.kernels.passes import lengths
from spingrad.optim.checks import WITHOUT_SKETCH
from spingrad.optim.gradient import Gradient, Scaled, is_sharded, placed
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, solved

Answer = tuple[Tensor, Tensor]
"""Spins of a weight, a row for each unit of this rank, and which of the units rest."""

CHECK_EVERY = 100  # steps after which the weights of all ranks are compared
MODES = ("together", "vote", "apart")
SKETCHED = 2
UNLIKE = "all ranks have to take the same step with the same model and settings"
UNEQUAL = (
    "the gradients are not the same on all ranks: wrap the model in DistributedDataParallel or fully_shard, "
    'which average them, or pass ranks="vote", or ranks="apart" for a model on each rank'
)
DRIFTED = "at step {} the weights are not the same on all ranks; something changed them on some ranks only"


class Stepping(Protocol):
    """What an optimizer does by itself, on one rank."""

    defaults: dict[str, Any]
    run: dict[str, int]
    solver: Solver

    @property
    def binary_groups(self) -> list[dict[str, Any]]: ...

    @property
    def ranks(self) -> str: ...

    @property
    def on_nonfinite(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def gradients(self) -> list[Gradient]: ...

    def accept(self, gradients: list[Gradient]) -> bool: ...

    def scale(self, gradient: Gradient) -> Scaled: ...

    def pose(self, scaled: Scaled) -> list[BinaryQuadratic]: ...


class Alone:
    """One process, or one of several that train a model each.

    Attributes:
        loaded: Whether a state was loaded since the weights of all ranks were compared.
    """

    loaded = False

    def check(self, optimizer: Stepping) -> None:
        """Compare settings and weights of all ranks now."""

    def gradients(self, optimizer: Stepping) -> list[Gradient]:
        return optimizer.gradients()

    def accept(self, optimizer: Stepping, gradients: list[Gradient]) -> bool:
        return optimizer.accept(gradients)

    def solve(
        self, optimizer: Stepping, gradients: list[Gradient], seed: int
    ) -> tuple[list[Scaled], list[Answer]]:
        scaled, posed = _posed(optimizer, gradients)
        solutions = solved(optimizer.solver, [problem for problems in posed for problem in problems], seed)
        return scaled, [_answer(own) for own in _regrouped(solutions, posed)]

    def begin(self, optimizer: Stepping, weights: Sequence[Tensor]) -> None:
        """Begin to train some weights."""

    def refuse(self, error: Exception) -> None:
        """Tell other ranks, if they wait, why this one does not begin."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""


class Together(Alone):
    """The ranks of DistributedDataParallel or ``fully_shard``: a rank is a pass.

    The engine averages gradients; sketches are added here, by one flat all-reduce. Where all ranks hold a
    whole weight, each solves a share of its units, and the spins of the others arrive as bits; where it is
    sharded, each solves the units that it holds, and only lengths of gradients are exchanged.

    Args:
        wire: Connects the ranks.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def gradients(self, optimizer: Stepping) -> list[Gradient]:
        found, error = _attempt(optimizer)
        have = {id(gradient.weight) for gradient in found}
        facts = {
            f"gradient of {name}": "none"
            for name, weight in zip(names_of(optimizer.binary_groups), _weights(optimizer), strict=True)
            if id(weight) not in have
        }
        self._compare(optimizer, "step()", error, facts, found)
        return self._added(found) if found else []

    def _added(self, gradients: list[Gradient]) -> list[Gradient]:
        sharded = [gradient for gradient in gradients if is_sharded(gradient.weight)]
        sums = self.wire.sums([*map(_sketch, gradients), *(placed(own.length, own) for own in sharded)])
        sketches, all_lengths = sums[: len(gradients)], iter(sums[len(gradients) :])
        found = [
            own._replace(sketch=sketch, length=next(all_lengths) if is_sharded(own.weight) else own.length)
            for own, sketch in zip(gradients, sketches, strict=True)
        ]
        if all(own.sketch is None for own in gradients) and not any(bool(own.any()) for own in sketches):
            return [own._replace(sketch=None) for own in found]  # on all ranks: zeros, or an error
        return found

    def accept(self, optimizer: Stepping, gradients: list[Gradient]) -> bool:
        """What it looks at is the same on all ranks, and so is the answer; the reason may not be."""
        try:
            if fine := optimizer.accept(gradients):
                return fine
        except Exception as error:
            agree(self.wire, optimizer.device, error=error)
        return agree(self.wire, optimizer.device, False)

    def solve(
        self, optimizer: Stepping, gradients: list[Gradient], seed: int
    ) -> tuple[list[Scaled], list[Answer]]:
        with self.settled(optimizer):
            scaled, posed = _posed(optimizer, gradients)
            shares = [
                problems if is_sharded(own.weight) else self._share(problems)
                for own, problems in zip(gradients, posed, strict=True)
            ]
            solutions = solved(optimizer.solver, [problem for own in shares for problem in own], seed)
            parts = _regrouped(solutions, shares)
            answers = [
                _answer(own) if own else _nobody(term.linear) for own, term in zip(parts, scaled, strict=True)
            ]
        whole = [i for i, own in enumerate(gradients) if not is_sharded(own.weight)]
        spins = self._exchanged([answers[i][0] for i in whole], [scaled[i].linear for i in whole])
        for i, all_spins in zip(whole, spins, strict=True):
            answers[i] = all_spins, torch.cat([problem.idle for problem in posed[i]])
        return scaled, answers

    def _share(self, problems: list[BinaryQuadratic]) -> list[BinaryQuadratic]:
        """The part of a weight's units that this rank solves, in all of its groups."""
        [start, end] = self._range(sum(problem.num_units for problem in problems), self.wire.rank)
        own, first = [], 0
        for problem in problems:
            low, high = max(start - first, 0), min(end - first, problem.num_units)
            if low < high:
                own.append(problem if high - low == problem.num_units else problem.units(low, high))
            first += problem.num_units
        return own

    def _range(self, units: int, rank: int) -> tuple[int, int]:
        return units * rank // self.wire.size, units * (rank + 1) // self.wire.size

    def _exchanged(self, own: list[Tensor], linear: list[Tensor]) -> list[Tensor]:
        """The spins of all units of some weights, whose linear terms have the shapes ``(m, n)``."""
        if not own:
            return []
        shapes = [part.shape for part in linear]
        counts = [
            [(end - start) * n for m, n in shapes for start, end in [self._range(m, rank)]]
            for rank in range(self.wire.size)
        ]
        longest = packed_size(max(map(sum, counts)))
        bits = pack(torch.cat([part.flatten() for part in own]))
        received = self.wire.all_gather(torch.cat([bits, bits.new_zeros(longest - len(bits))]))
        parts = [
            unpack(row, sum(each), torch.int8).split(each) for row, each in zip(received, counts, strict=True)
        ]
        pairs = zip(zip(*parts, strict=True), linear, strict=True)
        return [torch.cat(of_ranks).view(term.shape).to(term) for of_ranks, term in pairs]

    @contextmanager
    def settled(self, optimizer: Stepping) -> Iterator[None]:
        """Raise on all ranks the error that one of them meets on the way to its spins."""
        try:
            yield
        except Exception as error:
            agree(self.wire, optimizer.device, error=error)
        agree(self.wire, optimizer.device)

    def check(self, optimizer: Stepping) -> None:
        self.loaded = True
        self._compare(optimizer, "check()", None, {}, [])

    def _compare(
        self,
        optimizer: Stepping,
        call: str,
        error: Exception | None,
        facts: Facts,
        gradients: Sequence[Gradient],
    ) -> None:
        """Raise on all ranks, by a message of 24 bytes, an error of one of them, or what differs.

        Settings and which weights have gradients are compared in every step, and so are the lengths of
        gradients that an engine has averaged; weights now and then.
        """
        facts = failure(error) if error else {"call": call} | in_force(optimizer) | facts
        message = torch.zeros(3, dtype=torch.int64, device=optimizer.device)
        message[0] = digest(facts)
        seen = {gradient.name: gradient.length for gradient in gradients if not is_sharded(gradient.weight)}
        known = zip(names_of(optimizer.binary_groups), _weights(optimizer), strict=True)
        weights = {name: weight.detach() for name, weight in known if not is_sharded(weight)}
        step = optimizer.run["step"]
        due = error is None and bool(weights) and (self.loaded or step % CHECK_EVERY == 0)
        for place, tensors in ((1, seen), (2, weights if due else {})):
            if tensors and error is None:
                message[place] = fingerprints([fingerprints(tensors.values())])[0]
        told = self.wire.all_gather(message).tolist()
        for place, problem in enumerate((UNLIKE, UNEQUAL, DRIFTED.format(step))):
            if differ([rank[place] for rank in told]):
                if place and not all(rank[place] for rank in told):
                    continue  # some rank has nothing to compare
                own = facts if place == 0 else _digests(seen if place == 1 else weights)
                explain(self.wire, own, optimizer.device, problem)
        self.loaded = False


class Voting(Together):
    """Ranks that each solve the problem of their own rows; every weight moves the way of the majority.

    Nothing but bits is exchanged, so it serves slow networks. Each rank has a momentum of its own.

    Args:
        wire: Connects the ranks.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.vote = Vote(wire)

    def begin(self, optimizer: Stepping, weights: Sequence[Tensor]) -> None:
        """All ranks begin with the weights of the first one."""
        compare(self.wire, in_force(optimizer), optimizer.device, UNLIKE)
        for weight in weights:
            self.wire.broadcast_(weight.detach())

    def refuse(self, error: Exception) -> None:
        compare(self.wire, failure(error), torch.device("cpu"), UNLIKE)

    def gradients(self, optimizer: Stepping) -> list[Gradient]:
        found, error = _attempt(optimizer)
        self._compare(optimizer, "step()", error, {}, [])
        own = {id(gradient.weight): gradient for gradient in found}
        places = [(weight, group) for group in optimizer.binary_groups for weight in group["params"]]
        flags = torch.tensor([_flag(own.get(id(weight))) for weight, _ in places], dtype=torch.uint8)
        used = self.wire.all_gather(flags.to(optimizer.device)).amax(0).tolist()
        found = [
            own.get(id(weight)) or _nothing(name, weight, group)
            for name, (weight, group), flag in zip(
                names_of(optimizer.binary_groups), places, used, strict=True
            )
            if flag
        ]
        # Without any sketch it is an error, unless all gradients are zeros.
        return [_ballot(gradient) for gradient in found] if SKETCHED in used else found

    def accept(self, optimizer: Stepping, gradients: list[Gradient]) -> bool:
        """Whether the gradients of all ranks are finite: what one rank cannot use, no rank takes."""
        try:
            fine = optimizer.accept(gradients)
        except Exception as error:
            agree(self.wire, optimizer.device, error=error)
        return agree(self.wire, optimizer.device, fine)

    def solve(
        self, optimizer: Stepping, gradients: list[Gradient], seed: int
    ) -> tuple[list[Scaled], list[Answer]]:
        with self.settled(optimizer):
            scaled, posed = _posed(optimizer, gradients)
            problems = [problem for own in posed for problem in own]
            solutions = solved(optimizer.solver, problems, seed)
        decided = self.vote.decide(solutions, seed)
        return scaled, [_answer(own) for own in _regrouped(decided, posed)]

    def state_dict(self) -> dict[str, Any]:
        return self.vote.agreement.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # not that of another mode
            self.vote.agreement.load_state_dict(state)


def ranks_of(mode: Literal["together", "vote", "apart"], group: "dist.ProcessGroup | Wire | None") -> Alone:
    """The ranks that step together."""
    if mode not in MODES:
        raise ValueError(f"ranks is one of {', '.join(MODES)}, got {mode!r}")
    if isinstance(group, Wire):
        return Voting(group) if mode == "vote" else Together(group)
    if mode == "vote":
        return Voting(Wire(group))
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    return Together(Wire(group)) if several and mode == "together" else Alone()


def in_force(optimizer: Stepping) -> Facts:
    """What has to be the same on all ranks; it can change in a run, by a scheduler or a checkpoint."""
    run = {"step": str(optimizer.run["step"]), "seed": str(optimizer.run["seed"])}
    made = {
        "spingrad": __version__,
        "torch": str(torch.__version__).partition("+")[0],
        "ranks": optimizer.ranks,
        "solver": re.sub(r" at 0x[0-9a-f]+", "", repr(optimizer.solver)),  # without addresses
        "on_nonfinite": optimizer.on_nonfinite,
        "groups": str(len(optimizer.binary_groups)),
    }
    return run | made | facts_of(optimizer.binary_groups, list(optimizer.defaults))


def _attempt(optimizer: Stepping) -> tuple[list[Gradient], Exception | None]:
    """The gradients of this rank, or the error of which the others shall hear."""
    try:
        found = optimizer.gradients()
        for gradient in found:
            _sketch(gradient)
        return found, None
    except Exception as error:
        return [], error


def _posed(
    optimizer: Stepping, gradients: list[Gradient]
) -> tuple[list[Scaled], list[list[BinaryQuadratic]]]:
    scaled = [optimizer.scale(gradient) for gradient in gradients]
    return scaled, [optimizer.pose(own) for own in scaled]


def _answer(solutions: list[Solution]) -> Answer:
    """Spins and resting units of a weight's groups, one after the other."""
    spins = [solution.spins.T for solution in solutions]
    idle = [solution.problem.idle for solution in solutions]
    return (spins[0], idle[0]) if len(solutions) == 1 else (torch.cat(spins), torch.cat(idle))


def _nobody(linear: Tensor) -> Answer:
    """The answer of a rank that has none of a weight's units."""
    return linear[:0], torch.zeros(0, dtype=torch.bool, device=linear.device)


def _regrouped(solutions: list[Solution], posed: list[list[BinaryQuadratic]]) -> list[list[Solution]]:
    """The solutions of each weight's problems."""
    ends = accumulate(len(problems) for problems in posed)
    return [solutions[end - len(problems) : end] for end, problems in zip(ends, posed, strict=True)]


def _weights(optimizer: Stepping) -> list[Tensor]:
    return [weight for group in optimizer.binary_groups for weight in group["params"]]


def _digests(tensors: dict[str, Tensor]) -> Facts:
    prints = fingerprints(tensors.values()).tolist()
    return {f"digest of {name}": f"{value % 2**64:016x}" for name, value in zip(tensors, prints, strict=True)}


def _flag(gradient: Gradient | None) -> int:
    """What a rank has of a weight: nothing, a gradient, or a gradient and a sketch."""
    return 0 if gradient is None else 1 if gradient.sketch is None else SKETCHED


def _nothing(name: str, weight: Tensor, group: dict[str, Any]) -> Gradient:
    """The gradient of a weight that this rank has not used."""
    grad = torch.zeros_like(weight).flatten(1)
    return Gradient(name, weight, group, grad, None, lengths(grad))


def _sketch(gradient: Gradient) -> Tensor:
    """What passes of this rank have left; zeros if there was none."""
    if gradient.sketch is not None:
        return gradient.sketch
    leaf = getattr(getattr(gradient.weight, "companion", None), "leaf", None)
    if leaf is None:  # another optimizer has taken it over, and is gone
        raise RuntimeError(f"{gradient.name}: {WITHOUT_SKETCH}")
    return torch.zeros_like(leaf)


def _ballot(gradient: Gradient) -> Gradient:
    """What a rank votes with. Without rows of its own it abstains, whatever gradient DDP has given it."""
    if gradient.sketch is None:
        return gradient._replace(sketch=_sketch(gradient))
    live = gradient.sketch[:, -1, 0].amax() > 0
    return gradient._replace(length=gradient.length.where(live, 0))
