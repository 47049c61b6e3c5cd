"""The problems of chosen steps of a training run, kept to be solved again, saved or shared."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

from spingrad.optim.gradient import Gradient, Scaled
from spingrad.optim.qpsbgd import QPSBGD
from spingrad.problem import BinaryQuadratic


@contextmanager
def capture(optimizer: QPSBGD, steps: Container[int]) -> Iterator[list[BinaryQuadratic]]:
    """Keep the problems of the layers in some steps of an optimizer. Training is not changed.

    Each problem is kept as it goes to the solver. Its ``origin`` names the ``step``, the ``weight`` as in
    ``named_parameters`` (its number, if the optimizer got no names) and, for a layer with several groups of
    channels, the ``group``.

    Args:
        optimizer: The optimizer.
        steps: Numbers of the steps, the first being 0: a ``range``, a list or a set.

    Yields:
        The list of problems, in the order of steps and layers; it grows while the block runs.

    Example:
        >>> import torch
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = BinaryLinear(4, 3)
        >>> optimizer = QPSBGD(binary_parameters(model))
        >>> with capture(optimizer, steps=[1]) as problems:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(5, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> problems[0].origin
        {'step': 1, 'weight': 'weight'}
    """
    if not isinstance(optimizer, QPSBGD):
        raise TypeError(f"expected an optimizer QPSBGD, got {type(optimizer).__name__}")
    kept: list[BinaryQuadratic] = []
    pose, before = optimizer.pose, vars(optimizer).get("pose")  # one capture may run inside another

    def noted(scaled: Scaled) -> list[BinaryQuadratic]:
        problems = pose(scaled)
        if optimizer.run["step"] in steps:
            for group, problem in enumerate(problems):
                origin = {"step": optimizer.run["step"], "weight": _name(scaled.gradient)}
                origin |= {"group": group} if len(problems) > 1 else {}
                kept.append(replace(problem, H=problem.H.clone(), origin=origin))  # H is used again
        return problems

    optimizer.pose = noted  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del optimizer.pose
        if before is not None:
            optimizer.pose = before  # type: ignore[method-assign]


def _name(gradient: Gradient) -> str | int:
    weights = gradient.group["params"]
    number = next(i for i, weight in enumerate(weights) if weight is gradient.weight)
    return gradient.group["param_names"][number] if "param_names" in gradient.group else number
