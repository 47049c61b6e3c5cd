"""Hooks that a user has put on a module: what replaces the module would not run them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def users_hooks(module: nn.Module, kinds: Iterable[str]) -> list[Callable[..., Any]]:
    """The hooks of these kinds that are neither torch's nor ours.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> handle = layer.register_forward_hook(print)
        >>> len(users_hooks(layer, ["_forward_hooks", "_forward_pre_hooks"]))
        1
    """
    hooks = [hook for kind in kinds for hook in getattr(module, kind).values()]
    return [hook for hook in hooks if _package_of(hook) not in ("torch", "spingrad")]


def _package_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__module__", None)).partition(".")[0]
