"""Recording: how a backward pass leaves a record on a weight, if torch accumulates a gradient into it."""

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spingrad.mark import Mark
from spingrad.record import LayerRecord
from spingrad.rows import peak_of, to_rows

__all__ = ["Record", "record_of", "start_recording", "stop_recording"]

UNUSED = 100  # passes in a row that were cleared without a step, before a warning
_keys = itertools.count()
_records: weakref.WeakValueDictionary[int, "Record"] = weakref.WeakValueDictionary()


class Pass(NamedTuple):
    """The raw tensors of one use of a weight in a backward pass, and how they become rows."""

    x: Tensor
    version: int
    grad: Tensor
    geometry: tuple[int, ...]


class Record:
    """The backward passes of one weight since its last step.

    It holds exactly what torch accumulated into ``weight.grad``: a pass counts when torch accumulates a
    gradient into the weight, and ``weight.grad = None`` (``model.zero_grad()``) clears it. Passes of
    gradient accumulation, or of a weight used twice, add up as more rows.

    Args:
        weight: The latent weight.
        keep_grad: Compute ``weight.grad`` too. Otherwise ``weight.grad`` is a tensor of zeros that only
            marks that there is a record.

    Example:
        >>> from spingrad import BinaryLinear
        >>> layer = BinaryLinear(4, 3)
        >>> record = start_recording(layer.weight)
        >>> for _ in range(2):
        ...     layer(torch.ones(5, 4)).sum().backward()
        >>> record.layers()[0].rows.shape  # of both passes
        (10, 4)
    """

    def __init__(self, weight: Tensor, keep_grad: bool = False) -> None:
        self.keep_grad = keep_grad
        self.key = next(_keys)
        self.in_evaluation = False
        """Whether a gradient has come to the weight from a layer in evaluation mode, which leaves no rows."""
        _records[self.key] = self
        self.weight = weakref.ref(weight)
        self._passes: list[Pass] = []
        self._pending: dict[int, list[Pass | None]] = {}  # by the backward pass that is under way
        self._zeros: Mark | None = None
        self._holds_past = False  # whether a kept gradient has that of steps before in it
        self._others: list[Tensor] = []  # for each pass in doubt: whether there was another gradient
        self._unused = 0
        self._hook = _hooked(weight, self._commit)

    def note(self, x: Tensor, grad: Tensor, geometry: tuple[int, ...], training: bool = True) -> None:
        """Keep a pass until torch accumulates into the weight; forget it if torch never does."""
        if not self._is_ours():  # somebody has put zeros or another gradient in the place of the mark
            self.clear()
        task = torch._C._current_graph_task_id()
        if task not in self._pending:
            self._pending[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(_forget, weakref.ref(self), task)
            )
        self._pending[task].append(Pass(x, x._version, grad, geometry) if training else None)

    def _commit(self, weight: Tensor) -> None:
        passes = self._pending.pop(torch._C._current_graph_task_id(), [])
        if passes:
            self._passes += [own for own in passes if own is not None]
            self.in_evaluation |= None in passes
            if not isinstance(weight.grad, Mark):
                if not self.keep_grad and weight.grad is not None and not _has_no_entries(weight.grad):
                    self._others.append(_is_anything(weight.grad))
                weight.grad = self._marked(weight)

    def _marked(self, weight: Tensor) -> "Mark":
        """The gradient if it is kept, else zeros, which take no memory before somebody writes to them."""
        if self.keep_grad:
            assert weight.grad is not None
            return Mark.of(weight.grad, self)
        kept = self._zeros
        if kept is None or kept._version != 0 or (kept.dtype, kept.device) != (weight.dtype, weight.device):
            self._zeros = Mark.of(_untouched_zeros(weight), self)
        assert self._zeros is not None
        return self._zeros

    def has_other_gradient(self) -> bool:
        """Whether torch or somebody else has put more into ``weight.grad`` than what this record explains."""
        weight = self.weight()
        if not self._passes or weight is None or weight.grad is None:
            return False
        if not self._is_ours():
            return True
        grad, others = weight.grad, self._others
        if self.keep_grad:
            return not _has_process_group() and not self._explains(grad)  # a group may have averaged it
        if not isinstance(grad, Mark) or grad._version != 0:  # clipping writes to it too, without a change
            others = [*others, _is_anything(grad)]
        return any(bool(other) for other in others)

    def is_hooked(self) -> bool:
        """Whether a hook of the weight waits for a gradient, which is not computed."""
        return not self.keep_grad and bool(getattr(self.weight(), "_backward_hooks", None))

    def _explains(self, grad: Tensor) -> bool:
        """Whether a gradient is that of the record, up to its size, which clipping changes."""
        if self._holds_past:
            return True  # nobody has cleared it since the last step, so it cannot be told
        own = torch.cat([record.rows.pull_back(record.grad) for record in self.layers()]).flatten().double()
        found = grad.detach().as_subclass(Tensor).flatten().double()
        if not bool(own.isfinite().all() & found.isfinite().all()):
            return True  # the step says so; clipping makes NaN of all gradients if one is not finite
        size = torch.dot(found, own) / torch.dot(own, own).clamp_min(torch.finfo(own.dtype).tiny)
        exact = all(p.x.dtype == p.grad.dtype == _wide(p.x) for p in self._passes)
        rest = (found - size * own).norm()
        return bool(rest <= (1e-3 if exact else 3e-2) * found.norm()) and bool(size >= 0)

    def _is_ours(self) -> bool:
        """Whether ``weight.grad`` is the mark of this record, or a process group has put its own there."""
        weight = self.weight()
        grad = None if weight is None else weight.grad
        if isinstance(grad, Mark):
            return grad.owner() is self
        return grad is not None and _has_process_group() and grad._is_view()

    def _cleared(self) -> bool:
        weight = self.weight()
        return weight is None or weight.grad is None

    def clear(self) -> None:
        """Forget all passes, and warn if nobody has used any for a long time."""
        self._unused += bool(self._passes)
        if self._passes and self._unused == UNUSED:
            warnings.warn(
                f"{UNUSED} times in a row, what a binary layer recorded for QPSBGD was cleared without a "
                "step. Should another optimizer train its weight now, call spingrad.stop_recording(weight) "
                "for each weight of binary_parameters(model): then it gets ordinary gradients",
                stacklevel=2,
            )
        self._drop()

    def _drop(self) -> None:
        self._passes.clear()
        self._others, self.in_evaluation, self._holds_past = [], False, False

    def unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        """What ``GradScaler`` does to a gradient: multiply by ``inv_scale``, and note what is not finite."""
        # In single precision at least, or small gradients would underflow again.
        self._passes = [own._replace(grad=own.grad.to(_wide(own.grad)) * inv_scale) for own in self._passes]
        for own in self._passes:
            peaks = torch.stack([peak_of(own.x).to(inv_scale), peak_of(own.grad).to(inv_scale)])
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(peaks)).any().to(found_inf)))

    def consume(self) -> None:
        """Forget what a step has used; the mark goes too."""
        self._unused = 0
        self._drop()
        self._holds_past = self.keep_grad
        weight = self.weight()
        if weight is not None and not self.keep_grad:
            weight.grad = None

    def remove(self) -> None:
        """Stop recording."""
        self._hook.remove()
        self.consume()

    def layers(self) -> list[LayerRecord]:
        """One :class:`LayerRecord` per group of channels (one in all but grouped layers)."""
        if self._cleared():
            self.clear()
        for x, version, _, _ in self._passes:
            if x._version != version:
                raise RuntimeError(
                    "an input of a binary layer was modified by an in-place operation between backward() and "
                    f"step(): its shape is {tuple(x.shape)}, it is at version {x._version}, expected version "
                    f"{version}. The step needs the input as it was; use an out-of-place operation"
                )
        groups = zip(*(to_rows(p.x, p.grad, p.geometry) for p in self._passes), strict=True)
        return [LayerRecord.joined(group) for group in groups]

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_record, ()  # a weight that is loaded or sent elsewhere records for nobody


def _hooked(weight: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """A hook after each accumulation, also on a weight that is frozen for now."""
    trains = weight.requires_grad
    if not trains:
        weight.requires_grad_(True)
    handle = weight.register_post_accumulate_grad_hook(hook)
    if not trains:
        weight.requires_grad_(False)
    return handle


def _has_no_entries(grad: Tensor) -> bool:
    return grad.is_sparse and grad._nnz() == 0


def _is_anything(grad: Tensor) -> Tensor:
    """Whether an entry is not zero; NaN, which clipping makes of zeros, does not count."""
    return (grad.detach().to_dense().abs() > 0).any()


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _forget(record: "weakref.ref[Record]", task: int) -> None:
    if (own := record()) is not None:
        own._pending.pop(task, None)


def _no_record() -> None:
    return None


def _untouched_zeros(weight: Tensor) -> Tensor:
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return torch.from_numpy(np.zeros(weight.shape, np.float32))  # the system gives zeroed pages late
    return torch.zeros_like(weight)


class _Note(torch.autograd.Function):
    """The identity on a layer's output, whose backward pass notes the layer's input and output gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, key: int, geometry: list[int]) -> Tensor:
        _Note.setup(ctx, x, weight, key, geometry)
        return out.view_as(out)

    @staticmethod
    def setup(ctx: Any, x: Tensor, weight: Tensor, key: int, geometry: list[int]) -> None:
        ctx.save_for_backward(x, weight)  # torch checks that nobody changes them before the backward pass
        ctx.key, ctx.geometry, ctx.shape, ctx.dtype = key, geometry, weight.shape, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        if torch.compiler.is_compiling():
            if ctx.key < 0:
                return grad, None, None, None, None
            nothing = _take_op(x, grad, ctx.key, ctx.geometry, ctx.shape, ctx.dtype)
            return grad, None, nothing, None, None
        if torch.is_grad_enabled() and ctx.key >= 0:  # create_graph=True
            grad = _differentiated_once(grad, ctx.key)
        if in_transform():  # which accumulates nothing
            return grad, None, None, None, None
        _take(x, grad, ctx.key, ctx.geometry)
        return grad, None, _no_entries(ctx.shape, ctx.dtype, grad.device), None, None


class _NoteInTransform(torch.autograd.Function):
    """:class:`_Note` in the form that the transforms of ``torch.func`` need, which takes longer to call."""

    @staticmethod
    def forward(out: Tensor, x: Tensor, weight: Tensor, key: int, geometry: list[int]) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Note.setup(ctx, *inputs[1:])

    backward = _Note.backward

    @staticmethod
    def jvp(ctx: Any, out: Tensor, *_: Any) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, out: Tensor, x: Tensor, weight: Tensor, key: int, geometry: list[int]
    ) -> tuple[Tensor, int]:
        out, x = out.movedim(in_dims[0], 0), x.movedim(in_dims[1], 0)  # the dimension becomes more rows
        return _NoteInTransform.apply(out, x, weight, key, geometry), 0  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """The identity on a gradient, which cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, weight: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            "a second derivative (create_graph=True, such as a gradient penalty) through a binary layer that "
            "trains by records, which hold first derivatives only. What works: SignSGD or another "
            "optimizer of spingrad.baselines; a penalty of finite differences, as of "
            "model(x + epsilon * direction) - model(x); and, if only the input's derivatives are needed, "
            "torch.func.functional_call(model, copies, x) with detached copies of the parameters"
        )


def _differentiated_once(grad: Tensor, key: int) -> Tensor:
    record = _records.get(key)
    weight = None if record is None else record.weight()
    if weight is None or not weight.requires_grad:
        return grad
    once: Tensor = _Once.apply(grad, weight)  # type: ignore[no-untyped-call]
    return once


def in_transform() -> bool:
    """Whether ``torch.func.grad``, ``vmap`` or another transform of torch.func is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def _take(x: Tensor, grad: Tensor, key: int, geometry: Sequence[int]) -> None:
    """Note a pass; a negative key, ``~key``, is that of a layer in evaluation mode."""
    if (record := _records.get(max(key, ~key))) is not None:
        grad = grad.detach() if grad.requires_grad else grad  # a batched gradient cannot be detached
        record.note(x.detach(), grad, tuple(geometry), training=key >= 0)


def _no_entries(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient for the weight that costs nothing: torch accumulates it if it accumulates at all."""
    index, values = torch.empty((len(shape), 0), dtype=torch.long), torch.empty(0, dtype=dtype)
    return torch.sparse_coo_tensor(index, values, tuple(shape), device=device, check_invariants=False)


@torch.library.custom_op(  # a compiled graph cannot hold a record
    "spingrad::take",
    mutates_args=(),
    schema="(Tensor x, Tensor grad, int key, int[] geometry, int[] shape, ScalarType dtype) -> Tensor",
)
def _take_op(
    x: Tensor, grad: Tensor, key: int, geometry: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    _take(x.clone(), grad.clone(), key, geometry)  # compiled code writes to the memory of both later on
    return torch.zeros(shape, dtype=dtype, device=grad.device)


@_take_op.register_fake
def _(
    x: Tensor, grad: Tensor, key: int, geometry: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


def noted(out: Tensor, x: Tensor, weight: Tensor, geometry: tuple[int, ...], training: bool) -> Tensor:
    """A layer's output, which leaves ``(x, grad)`` on the weight in the backward pass if the weight records.

    Recording happens in the graph and not in module hooks, which trainers and wrappers lose. A layer that is
    not in training mode leaves no rows, and a step after that is an error.
    """
    record = record_of(weight)
    if record is None or not torch.is_grad_enabled():
        return out
    key = record.key if training else ~record.key
    note = _NoteInTransform if in_transform() else _Note
    product: Tensor = note.apply(out, x, weight, key, geometry)  # type: ignore[no-untyped-call]
    return product


def start_recording(weight: Tensor, keep_grad: bool = False) -> Record:
    """Make the layers of ``weight`` record, and no longer compute ``weight.grad`` unless asked.

    Example:
        >>> from spingrad import BinaryLinear
        >>> layer = BinaryLinear(4, 3)
        >>> record = start_recording(layer.weight)
        >>> layer(torch.ones(5, 4)).sum().backward()
        >>> record.layers()[0].grad.shape  # by the layer's output: 5 rows, 3 units
        torch.Size([5, 3])
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected the weight of a binary layer, a torch.Tensor, got {type(weight).__name__}")
    stop_recording(weight)
    record = Record(weight, keep_grad)
    weight.record = record  # type: ignore[attr-defined]
    return record


def stop_recording(weight: Tensor) -> None:
    """Return ``weight`` to binary passes and ordinary gradients, as any torch optimizer expects them.

    Example:
        >>> from spingrad import BinaryLinear
        >>> layer = BinaryLinear(4, 3)
        >>> _ = start_recording(layer.weight)
        >>> stop_recording(layer.weight)
        >>> layer(torch.ones(5, 4)).sum().backward()
        >>> layer.weight.grad[0]
        tensor([2.5000, 2.5000, 2.5000, 2.5000])
    """
    if (record := record_of(weight)) is not None:
        record.remove()
    for mark in ("record", "relaxed"):
        if hasattr(weight, mark):
            delattr(weight, mark)


def end(records: Sequence["weakref.ref[Record]"]) -> None:
    """Stop recording on all weights that still have one of these records."""
    for record in (own() for own in records):
        weight = None if record is None else record.weight()
        if weight is not None and record_of(weight) is record:
            stop_recording(weight)


def has_gradient_of_its_own(weight: Tensor) -> bool:
    """Whether ``weight.grad`` comes from something else than a record: the weight of an ordinary layer."""
    return weight.grad is not None and not isinstance(weight.grad, Mark)


def record_of(weight: Tensor) -> Record | None:
    """The record on a weight, or ``None`` if it does not record.

    Example:
        >>> from spingrad import QPSBGD, BinaryLinear, binary_parameters
        >>> layer = BinaryLinear(4, 3)
        >>> record_of(layer.weight) is None
        True
        >>> optimizer = QPSBGD(binary_parameters(layer))  # makes the layer record
        >>> record_of(layer.weight).layers()  # no backward pass yet
        []
    """
    return getattr(weight, "record", None)
