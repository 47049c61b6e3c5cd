"""Settings, weights and loaded states of QP-SBGD: whatever is wrong is said before anything moves."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spingrad._numbers import check_whole, is_whole
from spingrad.optim.gradient import local, shard_of

NOT_TIED = (
    "this weight is not tied to a binary layer. Pass binary_parameters(model), which ties weights to their "
    "layers; other weights belong to a torch optimizer: real_parameters(model)"
)
WITHOUT_SKETCH = (
    "it has a gradient, but since the last step no backward pass has left a sketch of its layer's "
    "inputs. After the optimizer was made, call loss.backward(), not backward(inputs=weights)"
)
INPUTS_OUT_OF_RANGE = (
    "squares of the layer's inputs overflow or underflow in its Gram matrix; scale the inputs, or keep some "
    "directions (rank=16)"
)
NOT_FINITE = "the latent weight has entries that are not finite; load or draw it anew"
LARGEST = 1e30  # a step must not leave the range of float32
OTHERS = ("weight_decay", "maximize", "nesterov", "dampening", "betas", "amsgrad")  # of torch's optimizers
OF_THE_RUN = ("seed", "solver", "on_nonfinite", "ranks")
SETTINGS = {"params", "lr", "clamp", "target_rms", "momentum", "whitening", "rank", "rows"}
LABELS = {"param_names", "name", "initial_lr"}  # what else a new group may hold; schedulers add more later


def check_added(group: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if a new group of parameters has a key that is no setting: a misspelt one."""
    unknown = sorted(map(str, set(group) - SETTINGS - LABELS - {*OTHERS, *OF_THE_RUN}))
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is no setting of a group of parameters; known: {sorted(SETTINGS - {'params'})}"
        )


def check_settings(group: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if a setting is out of range: when it is set, loaded, or scheduled."""
    if given := [name for name in OF_THE_RUN if name in group]:
        raise ValueError(f"{given[0]} belongs to the run: pass it to QPSBGD, not to a group of parameters")
    if given := [name for name in OTHERS if group.get(name)]:
        raise ValueError(
            f"{given[0]} is not a setting of QPSBGD, in which a latent weight moves by exactly lr and clamp "
            f"is what bounds it; got {given[0]}={group[given[0]]!r} in a group of parameters"
        )
    lr, clamp, target_rms = group["lr"], group["clamp"], group["target_rms"]
    momentum, whitening, rank, rows = (group[name] for name in ("momentum", "whitening", "rank", "rows"))
    if not (_is_number(lr) and 0 <= lr < LARGEST):
        raise ValueError(f"lr is a number of at least 0 and below {LARGEST:g}, got {lr!r}")
    if clamp is not None and not (_is_number(clamp) and 0 < clamp < LARGEST):
        raise ValueError(f"clamp is a positive number below {LARGEST:g} or None, got {clamp!r}")
    if not (_is_number(target_rms) and 0 < target_rms < math.inf) and not _is_among(target_rms, None, "auto"):
        raise ValueError(f'target_rms is a positive finite number, "auto" or None, got {target_rms!r}')
    if not (_is_number(momentum) and 0 <= momentum < 1):
        raise ValueError(f"momentum is in [0, 1), got {momentum!r}")
    if not (_is_number(whitening) and 0 <= whitening < math.inf):
        raise ValueError(f"whitening is a finite number of at least 0, got {whitening!r}")
    if rank is not None and not is_whole(rank, 1):
        raise ValueError(f"rank is a whole number of at least 1 or None, got {rank!r}")
    if not _is_among(rows, "uniform", "normalized"):
        raise ValueError(f'rows is "uniform" or "normalized", got {rows!r}')


def to_plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose numbers of numpy are Python's own, so that ``torch.load`` reads a saved state.

    Example:
        >>> import numpy as np
        >>> to_plain({"lr": np.float64(0.5), "rank": np.int64(4), "rows": "uniform", "clamp": None})
        {'lr': 0.5, 'rank': 4, 'rows': 'uniform', 'clamp': None}
    """
    return {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }


def check_run(run: object) -> None:
    """Raise a ``ValueError`` if seed, step or the number of skipped steps is not a whole number from 0."""
    for name in ("seed", "step", "skipped"):
        check_whole(name, run.get(name) if isinstance(run, dict) else None, 0)


def check_state(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise a ``ValueError`` that says what is wrong with a loaded state for these groups of parameters."""
    for key, kind in (("param_groups", list), ("state", dict)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f"expected the state_dict() of a QPSBGD, in which {key!r} is a {kind.__name__}, got the keys "
                f"{sorted(map(str, state_dict))} and {type(state_dict.get(key)).__name__}"
            )
    loaded = state_dict["param_groups"]
    for i, group in enumerate(loaded):
        real = isinstance(group, dict) and group.get("real")
        needed = {"params", "lr", "betas", "eps", "weight_decay", "run"} if real else SETTINGS | {"run"}
        if absent := needed - set(group if isinstance(group, dict) else ()):
            raise ValueError(f"group {i} of the loaded state lacks {sorted(absent)}")
        if not isinstance(group["params"], list):
            raise ValueError(f"params of group {i} is a list, got {type(group['params']).__name__}")
        if not real:
            check_settings(group)
        check_run(group["run"])
    sizes = [[len(group["params"]) for group in own] for own in (groups, loaded)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "expected a state of parameter groups with as many weights as in this optimizer, "
            f"{sizes[0]}, got {sizes[1]}"
        )
    if [bool(group.get("real")) for group in groups] != [bool(group.get("real")) for group in loaded]:
        raise ValueError("the loaded state has binary weights where this optimizer has real parameters")
    for own, other in zip(groups, loaded, strict=True):
        names, given = own.get("param_names"), other.get("param_names")
        if names and isinstance(given, list) and names != given and set(names) == set(map(str, given)):
            raise ValueError(
                f"the loaded state has the weights in another order, {given}, than this optimizer, {names}: "
                "each would get the average of another. Make both optimizers with the same order"
            )
    pairs = zip(loaded, groups, strict=True)
    weights = {key: own for one, two in pairs for key, own in zip(one["params"], two["params"], strict=True)}
    real_keys = {key for group in loaded if group.get("real") for key in group["params"]}
    for key, state in state_dict["state"].items():
        if not isinstance(state, dict):
            raise ValueError(f"the loaded state of weight {key} is a dict, got {type(state).__name__}")
        if not state or key in real_keys:
            continue
        check_whole(f"the loaded 'step' of weight {key}", state.get("step"), 0)
        average = state.get("exp_avg")
        shape = weights[key].shape if key in weights else None
        if not isinstance(average, Tensor) or average.shape != shape or not average.is_floating_point():
            raise ValueError(
                f"the loaded 'exp_avg' of weight {key} is a floating-point tensor of the weight's shape "
                f"{shape and tuple(shape)}, got {_described(average)}"
            )
        if not bool(torch.isfinite(local(average)).all()):
            raise ValueError(f"the loaded 'exp_avg' of weight {key} has entries that are not finite")


def check_weight(name: str, weight: Tensor) -> None:
    check_dtype(name, weight)
    if not weight.is_meta:
        check_finite(name, weight)


def check_sharded(name: str, weight: Tensor, group: dict[str, Any], ranks: str) -> None:
    """Raise an error if the step of a weight whose units lie on several ranks needs them all on one."""
    shard_of(weight)  # which refuses other layouts
    for setting, needs in (
        ("whitening", bool(group["whitening"])),
        ('rows="normalized"', group["rows"] == "normalized"),
        (f'ranks="{ranks}"', ranks != "together"),
    ):
        if needs:
            raise ValueError(
                f"{name}: {setting} needs all units of a weight on each rank, but fully_shard has split them "
                "out; wrap the model in DistributedDataParallel in place of it"
            )


def check_finite(name: str, weight: Tensor) -> None:
    if not bool(torch.isfinite(local(weight.detach())).all()):
        raise ValueError(f"{name}: {NOT_FINITE}")


def check_dtype(name: str, weight: Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: the latent weight is {weight.dtype}, in which a step of size lr can round to nothing. "
            "Keep it in float32, as binary layers do under model.bfloat16() and autocast"
        )


def _is_number(value: Any) -> bool:
    """Whether a value is one number, as a Python number or as a tensor, which schedulers of lr may use."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_among(value: object, *known: object) -> bool:
    return any(value is one or (isinstance(value, str) and value == one) for one in known)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
