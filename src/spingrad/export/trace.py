"""Reads a torch network as a graph of modules and functions, by ``torch.fx``."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from spingrad.nn.bits import Bits
from spingrad.nn.conv import BinaryConv1d, BinaryConv2d
from spingrad.nn.gain import Gain
from spingrad.nn.hooks import users_hooks
from spingrad.nn.linear import BinaryLayer, BinaryLinear
from spingrad.nn.sign import Sign, sign

LEAVES = BinaryLayer, Bits, Gain, Sign
KINDS = BinaryLinear, BinaryConv1d, BinaryConv2d, Bits, Gain, Sign
METHODS = "forward", "inputs", "product", "convolve"


class _Proxy(fx.Proxy):
    """Stands for a tensor, whose ``+=`` changes it in place."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(fx.Tracer):
    """Looks into modules of the user; those of torch and of spingrad stay whole."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(sign,))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)


def check_network(model: nn.Module) -> None:
    """Refuse what a copy of the network, or its graph, would leave out.

    The graph is made by running the forward of the user's own modules, with their hooks. It leaves out what
    is put around the forward of a leaf or of the whole network.
    """
    tracer = _Tracer()
    for name, module in model.named_modules():
        label = f"{name or 'the network'} ({type(module).__name__})"
        _check_weights(module, label)
        if module is model or tracer.is_leaf_module(module, name):
            check_hooks(module, label)
            _check_methods(module, label)


def _check_weights(module: nn.Module, label: str) -> None:
    if isinstance(module, BinaryLayer) and getattr(module.weight, "relaxed", False):
        raise ValueError(
            f"{label}: its weights are still real numbers, and pack expects spins; its optimizer has not "
            "finished training. Call optimizer.project() first"
        )
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and not value.is_leaf:
            raise ValueError(
                f"{label}: its {name} is computed from other tensors, and torch cannot copy it. Make it a "
                f'parameter first, as by prune.remove(module, "{name}") or remove_weight_norm(module)'
            )


def check_hooks(module: nn.Module, label: str) -> None:
    if users_hooks(module, ["_forward_hooks", "_forward_pre_hooks"]):
        raise ValueError(
            f"{label} has hooks, which pack cannot carry over: remove them first (handle.remove())"
        )


def _check_methods(module: nn.Module, label: str) -> None:
    kind = next((kind for kind in KINDS if isinstance(module, kind)), type(module))
    for name in METHODS if kind in KINDS else METHODS[:1]:
        changed = getattr(type(module), name, None) is not getattr(kind, name, None)
        if changed or name in vars(module):
            raise ValueError(
                f"{label} changes {name} of {kind.__name__}, which pack cannot carry over: use "
                f"{kind.__name__} as it is, and put what {name} adds into a module of its own"
            )


def traced(model: nn.Module) -> fx.GraphModule:
    """The network as a graph.

    Raises:
        ValueError: Its ``forward`` takes more than one tensor, or depends on the values of a tensor.
    """
    tracer = _Tracer()
    alone = not isinstance(model, nn.Sequential) and tracer.is_leaf_module(model, "")
    root = nn.Sequential(model) if alone else model  # a single layer is a network, too
    try:
        graph = tracer.trace(root)
    except Exception as error:  # the user's own code, run with stand-ins for tensors
        raise ValueError(
            f"{type(model).__name__}: its forward cannot be read as a graph "
            f"({type(error).__name__}: {error!s:.200}). It may call layers and functions of tensors in any "
            "order, but must not depend on their values"
        ) from error
    for node in graph.nodes:  # torch.fx writes their names, between quotes, into Python code that it runs
        odd = node.op in ("call_module", "get_attr") and set(node.target) & set('"\\\n\r\0')
        if odd:
            raise ValueError(
                f"names of layers must not have quotes, backslashes or line ends, got {node.target!r}"
            )
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ValueError(f"{type(model).__name__}: expected a forward with one input, got {len(inputs)}")
    found = fx.GraphModule(root, graph)
    _follow_changes(found)
    return found


def _follow_changes(graph: fx.GraphModule) -> None:
    """Whoever reads a tensor after an in-place operation gets the result: the graph has no memory."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    for node in [node for node in graph.graph.nodes if _is_in_place(node, graph)]:
        changed = node.args[0]
        for other in _same_memory(changed, graph) - {changed, node}:
            if any(order[user] > order[node] for user in other.users):
                raise ValueError(
                    f"{place_of(node)}: it changes a tensor in place that {place_of(other)} has in another "
                    "shape, and that is read again; use the operation that is not in place"
                )
        changed.replace_all_uses_with(node, lambda user, node=node: order[user] > order[node])


def _is_in_place(node: fx.Node, graph: fx.GraphModule) -> bool:
    if not (node.args and isinstance(node.args[0], fx.Node)):
        return False
    if node.op == "call_module":
        return bool(getattr(graph.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    names = list(inspect.signature(node.target).parameters) if node.target in _WITH_INPLACE else []
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return node.target is operator.iadd or bool(given.get("inplace", False))


def _same_memory(node: fx.Node, graph: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose results are views of the result of this one, or the other way round."""
    while _is_view(node, graph):
        node = node.args[0]  # type: ignore[assignment]
    found, rest = {node}, [node]
    while rest:
        views = [user for user in rest.pop().users if _is_view(user, graph)]
        found |= set(views)
        rest += views
    return found


def _is_view(node: fx.Node, graph: fx.GraphModule) -> bool:
    if not (node.args and isinstance(node.args[0], fx.Node)):
        return False
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), _VIEWS)
    return node.target in (torch.flatten, "flatten", "view", "reshape", "unsqueeze", torch.unsqueeze)


def place_of(node: fx.Node) -> str:
    """Where a node is in the network: the path of its module, or of the module whose forward calls it."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(stack.values())), "") if stack else ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name} in {path or 'the network'}"


def peaks(graph: fx.GraphModule, x: Tensor) -> dict[fx.Node, float]:
    """The largest magnitude of the result of every node on a batch."""
    found: dict[fx.Node, float] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and result.numel():
                found[n] = float(result.abs().max())
            return result

    with torch.no_grad():
        Watch(graph).run(x)
    return found


def as_module(node: fx.Node, graph: fx.GraphModule) -> nn.Module | None:
    """The module that a node calls, or one that does the same as the function or method that it calls."""
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))
    if node.op not in ("call_function", "call_method") or node.target not in _FUNCTIONS:
        return None
    try:
        return _FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
    except (TypeError, ValueError):  # options that the module does not have
        return None


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _dropout(*_: Any, **__: Any) -> nn.Module:
    return nn.Identity()


def _relu(inplace: bool = False) -> nn.Module:
    return nn.ReLU()


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> nn.Module:
    return nn.Hardtanh(min_val, max_val)


def _view(*shape: Any) -> nn.Module | None:
    """Only ``x.view(len(x), -1)``: everything but the first dimension in one."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    flat = len(sizes) == 2 and sizes[1] == -1 and not isinstance(sizes[0], int)
    return nn.Flatten() if flat else None


def _mean(dim: Any = None, keepdim: bool = False) -> nn.Module | None:
    dims = {dim} if isinstance(dim, int) else set(dim or ())
    pools: dict[frozenset[int], type[nn.Module]] = {
        frozenset({2, 3}): nn.AdaptiveAvgPool2d,
        frozenset({-2, -1}): nn.AdaptiveAvgPool2d,
        frozenset({2}): nn.AdaptiveAvgPool1d,
        frozenset({-1}): nn.AdaptiveAvgPool1d,
    }
    pool = pools.get(frozenset(dims))
    if pool is None:
        return None
    return pool(1) if keepdim else nn.Sequential(pool(1), nn.Flatten())


_FUNCTIONS: dict[Any, Callable[..., nn.Module | None]] = {
    sign: Sign,
    F.relu: _relu,
    torch.relu: _relu,
    "relu": _relu,
    F.relu6: lambda inplace=False: nn.ReLU6(),
    F.hardtanh: _hardtanh,
    torch.clamp: lambda min=None, max=None: _hardtanh(min, max) if None not in (min, max) else None,
    "clamp": lambda min=None, max=None: _hardtanh(min, max) if None not in (min, max) else None,
    F.dropout: _dropout,
    F.max_pool1d: nn.MaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    torch.flatten: _flatten,
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "mean": _mean,
    torch.mean: _mean,
    "unsqueeze": lambda dim: nn.Unflatten(1, (1, -1)) if dim == 1 else None,
    torch.unsqueeze: lambda dim: nn.Unflatten(1, (1, -1)) if dim == 1 else None,
}
_WITH_INPLACE = F.relu, F.relu6, F.hardtanh, F.dropout
_VIEWS = nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d
ADDITIONS = operator.add, operator.iadd, torch.add, "add", "add_"
JOINS = torch.cat, torch.concat, torch.concatenate
PADS = (F.pad,)
SHAPES = getattr, operator.getitem, "size", len
"""Functions of a tensor's shape, which only ``view`` needs."""
