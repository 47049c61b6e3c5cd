"""The handshake: do all ranks have the same model and settings? If not, which rank differs in what?"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from spingrad.distributed.wire import Wire
from spingrad.sketch import mixed

Facts = dict[str, str]
"""What has to be the same on all ranks: the name of a setting and its value, as text."""

FAILED = "error"
NAMED = 5  # differences that an error names
CHUNK = 2**20  # words of a weight that are hashed together


def failure(error: Exception) -> Facts:
    """The facts of a rank that has none, because of an error; the others hear of it."""
    return {FAILED: f"{type(error).__name__}: {error}"}


def facts_of(groups: Sequence[dict[str, Any]], settings: Sequence[str]) -> Facts:
    """The settings of parameter groups, and dtype and shape of their weights.

    Example:
        >>> facts_of([{"lr": 0.5, "params": [torch.zeros(2, 3)]}], ["lr"])
        {'lr': '0.5', 'weight 0': 'torch.float32 of shape (2, 3), requires_grad=False'}
    """
    facts: Facts = {}
    for i, group in enumerate(groups):
        place = f" of group {i}" if len(groups) > 1 else ""
        facts |= {f"{name}{place}": _as_text(group[name]) for name in settings if name in group}
    weights = [weight for group in groups for weight in group["params"]]
    for name, weight in zip(names_of(groups), weights, strict=True):
        frozen = "" if weight.requires_grad else ", requires_grad=False"
        leaf = getattr(getattr(weight, "companion", None), "leaf", None)
        split = "" if leaf is None or len(leaf) == 1 else f" in {len(leaf)} groups"
        facts[name] = f"{weight.dtype} of shape {tuple(weight.shape)}{split}{frozen}"
    return facts


def names_of(groups: Sequence[dict[str, Any]]) -> list[str]:
    """What errors call the weights: their number and, if known, their name."""
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    return [f"weight {i}" if name is None else f"weight {i} {name!r}" for i, name in enumerate(names)]


def _as_text(value: Any) -> str:
    """A setting as text, the same for 1, 1.0 and a tensor of it."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, int | float):
        value = int(value) if float(value).is_integer() else float(value)
    return repr(value)


def digest(facts: Facts) -> int:
    """A number of 64 bits that stands for the facts."""
    return int.from_bytes(hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest(), signed=True)


def compare(wire: Wire, facts: Facts, device: torch.device, problem: str) -> None:
    """Raise the same error on all ranks if their facts differ.

    The first message is as long as that of a step, whatever the facts are.

    Args:
        wire: Connects the ranks, which call this together.
        facts: What has to be the same.
        device: Where the process group takes its tensors.
        problem: The sentence with which the error begins.
    """
    if differ(wire.all_gather(torch.tensor([digest(facts), 0, 0], device=device)).tolist()):
        explain(wire, facts, device, problem)


def differ(parts: Sequence[object]) -> bool:
    return any(part != parts[0] for part in parts)


def explain(wire: Wire, facts: Facts, device: torch.device, problem: str) -> NoReturn:
    """Exchange the facts, which are known to differ, and raise an error that names the differences."""
    found = differences([json.loads(text) for text in texts(wire, json.dumps(facts), device)])
    more = f"; and {len(found) - NAMED} more differences" if len(found) > NAMED else ""
    numeric = all(" raised FloatingPointError: " in one for one in found)
    raise (FloatingPointError if numeric else RuntimeError)(f"{problem}: {'; '.join(found[:NAMED])}{more}")


def agree(wire: Wire, device: torch.device, fine: bool = True, error: Exception | None = None) -> bool:
    """Whether all ranks are fine; the error of one rank is raised on all."""
    verdict = 0 if error is not None else 1 + fine
    worst = int(wire.all_gather(torch.tensor(verdict, dtype=torch.uint8, device=device)).min())
    if worst == 0:
        explain(wire, {} if error is None else failure(error), device, "nothing has moved")
    return worst == 2


def texts(wire: Wire, own: str, device: torch.device) -> list[str]:
    """The text of every rank."""
    data = own.encode()
    lengths = wire.all_gather(torch.tensor([len(data)], device=device))[:, 0].tolist()
    padded = bytearray(data.ljust(max(lengths) + 1))  # at least one byte: torch takes no empty buffer
    sent = wire.all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device)).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(sent, lengths, strict=True)]


def differences(told: Sequence[Facts]) -> list[str]:
    """What the ranks disagree on, one sentence for each setting; the rank in the minority comes first.

    Example:
        >>> differences([{"lr": "0.003"}, {"lr": "0.01"}])
        ['rank 1 has lr=0.01, rank 0 has lr=0.003']
    """
    if failed := [
        f"rank {rank} raised {facts[FAILED]}" for rank, facts in enumerate(told) if FAILED in facts
    ]:
        return failed
    names = dict.fromkeys(name for facts in told for name in facts)
    found = []
    for name in names:
        ranks = defaultdict(list)
        for rank, facts in enumerate(told):
            ranks[facts.get(name)].append(rank)
        if len(ranks) > 1:
            parties = sorted(ranks.items(), key=lambda party: (len(party[1]), 0 in party[1]))
            found.append(", ".join(_sentence(who, name, value) for value, who in parties))
    return found


def named(ranks: Sequence[int]) -> str:
    """How sentences call some ranks.

    Example:
        >>> named([1]), named([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def fingerprints(weights: Iterable[Tensor]) -> Tensor:  # -> (weights,)
    """A number of 64 bits for each weight, from its bits and their order; nothing is read back to the host.

    Example:
        >>> a, b = fingerprints([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
        >>> bool(a == b)
        False
    """
    return torch.stack([_fingerprint(weight.detach()) for weight in weights])


def _fingerprint(weight: Tensor) -> Tensor:  # any shape -> ()
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for i, words in enumerate(weight.contiguous().flatten().view(torch.int32).split(CHUNK)):
        place = torch.arange(len(words), device=weight.device) + i * CHUNK
        total += mixed(words + mixed(place)).sum()
    return total


def _sentence(ranks: Sequence[int], name: str, value: str | None) -> str:
    has = "has" if len(ranks) == 1 else "have"
    return f"{named(ranks)} {has} " + (f"no {name}" if value is None else f"{name}={value}")
