"""The handshake: do all ranks have the same model and settings? If not, which rank differs in what?"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from spingrad.distributed.wire import Wire

Facts = dict[str, str]
"""What has to be the same on all ranks: the name of a setting and its value, as text."""

FAILED = "error"
LONGEST = 2**20  # bytes of text that a rank sends about itself
NAMED = 5  # differences that an error names
CHUNK = 2**16  # numbers of a weight that are digested at once


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
        facts[name] = f"{weight.dtype} of shape {tuple(weight.shape)}{frozen}"
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


def digest(facts: Facts) -> list[int]:
    """Eight bytes that stand for the facts, as two numbers of 32 bits."""
    bits = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest()
    return [int.from_bytes(half, "little", signed=True) for half in (bits[:4], bits[4:])]


def compare(wire: Wire, facts: Facts, device: torch.device, problem: str) -> None:
    """Raise the same error on all ranks if their facts differ.

    The first message has eight bytes whatever the facts are, so ranks with another model can take part.

    Args:
        wire: Connects the ranks, which call this together.
        facts: What has to be the same.
        device: Where the process group takes its tensors.
        problem: The sentence with which the error begins.
    """
    if differ(wire.all_gather(torch.tensor(digest(facts), dtype=torch.int32, device=device)).tolist()):
        explain(wire, facts, device, problem)


def differ(parts: Sequence[object]) -> bool:
    return any(part != parts[0] for part in parts)


def explain(wire: Wire, facts: Facts, device: torch.device, problem: str) -> NoReturn:
    """Exchange the facts, which are known to differ, and raise an error that names the differences."""
    told: list[Facts] = [json.loads(text) for text in texts(wire, _bounded(facts), device)]
    found = differences(told)
    more = f"; and {len(found) - NAMED} more differences" if len(found) > NAMED else ""
    listed = "; ".join(found[:NAMED]) or "in more settings than fit into a message"
    raise RuntimeError(f"{problem}: {listed}{more}")


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
    """A number of 64 bits for each weight, from its bytes; nothing is read back to the host.

    Example:
        >>> a, b = fingerprints([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
        >>> bool(a == b)
        False
    """
    return torch.stack([_fingerprint(weight.detach()) for weight in weights])


def _fingerprint(weight: Tensor) -> Tensor:  # any shape -> ()
    """A sum of products with random odd numbers (multilinear hashing), modulo 2^64."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    keys = _keys(weight.device)
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for part in weight.contiguous().flatten().view(words).split(CHUNK):
        total = total * keys[0] + (part * keys[: len(part)]).sum()
    return total


@cache
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)


def _bounded(facts: Facts) -> str:
    """The facts as JSON; the last of them are left out if it would be too long."""
    text = json.dumps(facts)
    while len(text) > LONGEST:
        facts = dict(list(facts.items())[: len(facts) // 2])
        text = json.dumps(facts)
    return text


def _sentence(ranks: Sequence[int], name: str, value: str | None) -> str:
    has = "has" if len(ranks) == 1 else "have"
    return f"{named(ranks)} {has} " + (f"no {name}" if value is None else f"{name}={value}")
