"""What a step begins with: a gradient and a sketch for each weight, or for the units of it on this rank."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from spingrad.optim.functional import Quadratic


class Gradient(NamedTuple):
    """What backward passes have left for one weight since the last step.

    Args:
        name: What error messages call the weight.
        weight: The latent weight.
        group: The settings of its parameter group.
        grad: Its gradient, a row for each unit of this rank, shape ``(units, n)``.
        sketch: That of its companion; ``None`` if no pass has left one.
        length: Of each unit's gradient; where the weight is sharded, first of this rank's, then of all.
        first: Number of this rank's first unit.
    """

    name: str
    weight: Tensor
    group: dict[str, Any]
    grad: Tensor
    sketch: Tensor | None
    length: Tensor
    first: int = 0


class Scaled(NamedTuple):
    """A gradient with what its sketch says of it.

    Args:
        gradient: What backward passes have left.
        quadratic: The rows of the quadratic term, and how long the linear term is to be.
        linear: The gradient of the linear term, shape ``(units, n)``: as published not the weight's own.
        size: The factor of each unit's gradient, shape ``(units,)``.
    """

    gradient: Gradient
    quadratic: Quadratic
    linear: Tensor
    size: Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds some units only: a DTensor, whose class takes long to import."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    if not is_sharded(tensor):
        return tensor
    own: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return own


def like(own: Tensor, weight: Tensor) -> Tensor:
    """A rank's part of a state as a tensor like the weight, which torch saves in one piece."""
    if not is_sharded(weight):
        return own.view(weight.shape)
    from torch.distributed.tensor import DTensor

    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    own = own.view(local(weight).shape)
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def shard_of(weight: Tensor) -> tuple[int, bool]:
    """Number of the first unit that this rank holds, and whether it is the first rank that holds it.

    ``fully_shard`` gives equal runs of units to the ranks of one dimension of the mesh, and the same ones to
    those of the others.
    """
    if not is_sharded(weight):
        return 0, True
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    sharded = [i for i, placement in enumerate(placements) if placement.is_shard(0)]
    others = [i for i, placement in enumerate(placements) if placement.is_replicate()]
    if len(sharded) != 1 or len(sharded) + len(others) != len(placements):
        raise TypeError(
            f"the weight is laid out as {placements}, but its units have to lie along one dimension of the "
            "mesh, as fully_shard(module) lays them out"
        )
    [along] = sharded
    most = -(-weight.shape[0] // mesh.size(along))
    first = min(weight.shape[0], most * mesh.get_local_rank(along))
    return first, all(mesh.get_local_rank(i) == 0 for i in others)


def placed(own: Tensor, gradient: Gradient) -> Tensor:
    """The lengths of this rank's units at their places, zeros for others; a sum over ranks has them all."""
    first, counts = shard_of(gradient.weight)
    total = torch.zeros(gradient.weight.shape[0], dtype=own.dtype, device=own.device)
    if counts:
        total[first : first + len(own)] = own
    return total
