"""The mark: what ``weight.grad`` is while a weight has a record, so that habits with gradients reach it."""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Owner(Protocol):
    """The record that a mark stands for."""

    keep_grad: bool

    def weight(self) -> Tensor | None: ...

    def clear(self) -> None: ...

    def unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None: ...


class Mark(Tensor):
    """``weight.grad`` of a weight with a record: what is done to it is done to the record.

    Setting it to zero in place clears the record, and a ``GradScaler`` that unscales it unscales the record.
    Clipping leaves the direction of a gradient, which is what the step uses. Other changes would have no
    effect on the step, and raise an error. So does another optimizer, which would read zeros.
    """

    owner: "weakref.ref[Owner]"

    @staticmethod
    def of(grad: Tensor, owner: Owner) -> "Mark":
        mark = grad.as_subclass(Mark)
        mark.owner = weakref.ref(owner)
        return mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DATA:  # p.grad.data.zero_() is p.grad.zero_()
            return args[0]
        name = "data" if func == _SET_DATA else getattr(func, "__name__", "").removeprefix("_foreach_")
        first, *others = [_marks(arg) for arg in args] or [[]]
        unscales = func is torch._amp_foreach_non_finite_check_and_unscale_
        if _is_in_place(name) and not unscales:
            for place, mark in first:
                _check_change(mark, name, args, place)
        if (name in _MOVES or name.startswith("_fused_")) and not first:
            _check_read(name, [mark for found in others for _, mark in found])
        if name == "add" and len(args) > 1:  # weight decay, before the gradient is read
            own = args[1] if isinstance(args[1], list | tuple) else [args[1]]
            decayed = [mark for place, mark in first if place < len(own) and own[place] is mark.weight()]
            _check_read("weight decay", decayed)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if unscales:
            for _, mark in first:
                if (owner := mark.owner()) is not None:
                    owner.unscale(*args[1:])
        elif name in _CONVERSIONS and first and type(result) is Tensor and (owner := args[0].owner()):
            return Mark.of(result, owner)
        return result

    def weight(self) -> Tensor | None:
        owner = self.owner()
        return None if owner is None else owner.weight()


_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERSIONS = {"detach", "to", "double", "float", "cpu", "cuda"}  # of a model that is moved, for example
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "data"}
_FACTORS = {"mul_", "div_", "__imul__", "__itruediv__"}
_HARMLESS = {"requires_grad_", "detach_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_"}
_HARMLESS |= {"share_memory_"}
_MOVES = {"add_", "sub_", "lerp_", "addcmul_", "addcdiv_"}  # how optimizers read gradients


def _marks(arg: Any) -> list[tuple[int, Mark]]:
    """The marks in an argument, and their places if it is a list."""
    tensors = arg if isinstance(arg, list | tuple) else [arg]
    return [(place, own) for place, own in enumerate(tensors) if isinstance(own, Mark)]


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _check_change(mark: Mark, name: str, args: tuple[Any, ...], place: int) -> None:
    """Clear the record if a gradient becomes zero; an error if more of it changes than its size."""
    value = args[1] if len(args) > 1 else None
    if isinstance(value, list | tuple) and isinstance(args[0], list | tuple):
        value = value[place]
    is_zero = isinstance(value, int | float) and value == 0
    if name == "zero_" or (is_zero and name in ("fill_", "mul_", "__imul__")):
        if (owner := mark.owner()) is not None:
            owner.clear()
        return
    moved = name == "data" and isinstance(value, Mark)  # with the model, to another device or dtype
    if not (moved or name in _HARMLESS or (name in _FACTORS and _is_size(value))):
        raise RuntimeError(
            f"{name} on weight.grad of a binary weight that trains by records: the step reads the record and "
            "not weight.grad, so this would have no effect. What works: a hook on the layer's output, or an "
            "optimizer that uses gradients, such as SignSGD of spingrad.baselines"
        )


def _is_size(factor: Any) -> bool:
    """Whether a factor changes no more than the size of a gradient, as clipping does."""
    if not isinstance(factor, Tensor):
        return not factor < 0
    on_cpu = factor.device.type == "cpu"  # elsewhere, a look at it would have to wait for the device
    return factor.numel() == 1 and not (on_cpu and bool(factor < 0))


def _check_read(name: str, marks: Sequence[Mark]) -> None:
    owners = [owner for mark in marks if (owner := mark.owner()) is not None]
    if any(not owner.keep_grad for owner in owners):
        raise RuntimeError(
            f"{name} reads weight.grad of a binary weight, which is not computed, since a QPSBGD trains this "
            "weight by records. Give another optimizer real_parameters(model). If it should train binary "
            "weights, call spingrad.stop_recording(weight) for each of them first. To watch gradients, pass "
            "keep_grad=True to QPSBGD"
        )
