"""Converts any torch model: linear layers, convolutions and attention become binary."""

import itertools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from spingrad.nn.attention import BinaryMultiheadAttention
from spingrad.nn.conv import BinaryConv1d, BinaryConv2d, BinaryConv3d, BinaryConvTranspose2d, exchanged
from spingrad.nn.hooks import users_hooks
from spingrad.nn.linear import BinaryLayer, BinaryLinear, Scale, binary_parameters
from spingrad.nn.sign import spins_of

LARGEST = 0.01  # the magnitude of the largest latent weight, as in a new layer
BINARY: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Linear: BinaryLinear,
    nn.Conv1d: BinaryConv1d,
    nn.Conv2d: BinaryConv2d,
    nn.Conv3d: BinaryConv3d,
    nn.ConvTranspose2d: BinaryConvTranspose2d,
}
REPLACED: tuple[type[nn.Module], ...] = (*BINARY, nn.MultiheadAttention)
WEIGHTS = {"weight", "bias"}
OF_ATTENTION = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
OF_ATTENTION |= {"bias_k", "bias_v", "out_proj.weight", "out_proj.bias"}
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
Keep = str | type[nn.Module]
Start = Literal["fan_in", "mean"] | float


def convert(model: nn.Module, *, keep: Keep | Iterable[Keep] = (), scale: Start = "fan_in") -> nn.Module:
    """Replace linear layers, convolutions and attention of a model by binary ones, in place.

    The new weights have the signs of the trained ones (zero counts as +1). The latent weights keep the order
    of the magnitudes, the largest being 0.01 as in a new layer, so that weights near zero flip first. Biases
    are kept as they are.

    Replaced are ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``, ``nn.ConvTranspose2d`` and
    ``nn.MultiheadAttention``, so that ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer`` work
    too.

    Args:
        model: The model. It is changed.
        keep: What stays real: names of modules as in ``model.named_modules()`` with all that they contain,
            types of modules, and ``"first"`` and ``"last"`` of the layers in that order.
        scale: Factor of each layer's output: ``"fan_in"`` for ``1 / √fan_in``; ``"mean"`` for the mean of the
            unit's absolute trained weights, so that outputs stay near those of the trained model; a number.

    Returns:
        The model; a new layer if the model is itself one of the layers above.

    Raises:
        ValueError: A layer cannot be replaced and is not in ``keep``, or there is nothing to replace.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Hardtanh(), nn.Linear(32, 10))
        >>> convert(model, keep="last")
        Sequential(
          (0): BinaryLinear(64, 32, bias=True, scale=0.125)
          (1): Hardtanh(min_val=-1.0, max_val=1.0)
          (2): Linear(in_features=32, out_features=10, bias=True)
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(scale, bool) or not (
        scale in ("fan_in", "mean") if isinstance(scale, str) else 0 < scale < float("inf")
    ):
        raise ValueError(f'scale is "fan_in", "mean" or a positive number, got {scale!r}')
    layers = _layers(model)
    kept = _kept(model, layers, [keep] if isinstance(keep, str | type) else list(keep))
    names = {module: name for name, module in layers.items() if name not in kept}
    if not names:
        raise ValueError(
            f"nothing to convert: the model has the layers {[*layers]}, of which {sorted(kept)} are kept"
        )
    for module, name in names.items():
        _check(module, name)
    _check_ties(model, names)
    conversion = _Conversion(scale)
    new = {module: conversion.of(module) for module in names}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])
    for module in model.modules():
        _avoid_nested_tensors(module)
    return new.get(model, model)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that could be converted, by name; those inside of attention belong to it."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, REPLACED):
            found[name] = module
            inside.update(module.modules())
    return found


def _kept(model: nn.Module, layers: dict[str, nn.Module], keep: list[Keep]) -> set[str]:
    """The names of the layers that stay real."""
    kept: set[str] = set()
    every = [*model.named_modules(remove_duplicate=False)]
    for own in keep:
        if own in ("first", "last") and layers:
            kept.add([*layers][0 if own == "first" else -1])
            continue
        meant = [module for name, module in every if _is_meant(own, name, module)]
        inside = {part for module in meant for part in module.modules()}
        names = {name for name, module in layers.items() if module in inside}
        if not names:
            raise ValueError(f"keep: {own!r} has no layer to keep; the layers are {[*layers]}")
        kept |= names
    return kept


def _is_meant(keep: Keep, name: str, module: nn.Module) -> bool:
    return name == keep if isinstance(keep, str) else isinstance(module, keep)


def _check(module: nn.Module, name: str) -> None:
    """Refuse what a binary layer would not do as the module does."""
    label = f"{name or 'the model'} ({type(module).__name__})"
    advice = "which convert cannot carry over: keep the layer (keep=…) or remove that first"
    kind = _kind(module)
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise ValueError(f"{label} has no weights yet: pass a batch through the model first")
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(f"{label} is on the meta device and has no values: load its weights first")
    if any(parametrize.is_parametrized(own) for own in module.modules()):
        raise ValueError(f"{label} has a parametrization, {advice}")
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    if any(getattr(own, hook) for own in module.modules() for hook in hooks):
        raise ValueError(f"{label} has hooks, {advice}")
    if any(users_hooks(own, STATE_HOOKS) for own in module.modules()):
        raise ValueError(f"{label} has hooks on its state_dict, {advice}")
    for part, parameter in module.named_parameters():  # biases stay what they are
        has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if has_hooks and part not in ("bias", "out_proj.bias"):
            raise ValueError(f"{label} has hooks on {part}, {advice}")
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise ValueError(f"{label} is a {kind.__name__} with a forward of its own, {advice}")
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    if own := sorted(tensors.keys() - (WEIGHTS if kind in BINARY else OF_ATTENTION)):
        raise ValueError(f"{label} is a {kind.__name__} with tensors of its own, {own}, {advice}")
    if not all(parameter.isfinite().all() for parameter in module.parameters()):
        raise ValueError(f"{label} has weights that are not finite")
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None:
            raise ValueError(f"{label} has add_bias_kv=True, {advice}")
        if module.add_zero_attn:
            raise ValueError(f"{label} has add_zero_attn=True, {advice}")


def _kind(module: nn.Module) -> type[nn.Module]:
    return next(kind for kind in REPLACED if isinstance(module, kind))


def _check_ties(model: nn.Module, names: dict[nn.Module, str]) -> None:
    """Refuse a weight that a layer would share with a module of another kind, or with one that stays real."""
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, module))
    inside = {own for layer in names for own in layer.modules()}
    for parameter, modules in owners.items():
        layers = [
            (name, own)
            for name, own in modules
            if own in inside and getattr(own, "bias", None) is not parameter
        ]
        for (name, own), (other_name, other) in itertools.product(layers, modules):
            together = own in names and other in names and _kind(own) is _kind(other) in BINARY
            if other is not own and not together:
                raise ValueError(
                    f"{name!r} shares its weight with {other_name!r} ({type(other).__name__}), and convert "
                    f"cannot replace both: keep it real (keep={name!r}) or give it a weight of its own"
                )


class _Conversion:
    """Makes binary layers; weights that are shared stay shared."""

    def __init__(self, scale: Start) -> None:
        self.scale = scale
        self._latents: dict[Tensor, nn.Parameter] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.MultiheadAttention):
            return self._attention(module).train(module.training)
        return self._layer(module).train(module.training)

    def _layer(self, module: Any) -> BinaryLayer:
        kind = _kind(module)
        names = ["in_features", "out_features"]
        if kind is not nn.Linear:
            names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"]
            names += ["groups", "padding_mode"]
        transposed = kind is nn.ConvTranspose2d
        if transposed:
            names += ["output_padding"]
        weight = module.weight.detach()
        weight = exchanged(weight, module.groups) if transposed else weight
        if module.weight not in self._latents:
            self._latents[module.weight] = _latent(weight, module.weight.requires_grad)
        arguments = {name: getattr(module, name) for name in names}
        return self._made(BINARY[kind], arguments, weight, self._latents[module.weight], module.bias)

    def _attention(self, module: nn.MultiheadAttention) -> BinaryMultiheadAttention:
        sizes = {name: getattr(module, name) for name in ("kdim", "vdim", "batch_first")}
        new = BinaryMultiheadAttention(
            module.embed_dim, module.num_heads, module.dropout, **sizes, device="meta"
        )
        packed: nn.Parameter | None = module.in_proj_weight
        if packed is None:
            parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
            weights = [(part.detach(), part.requires_grad) for part in parts]
        else:
            weights = [(part, packed.requires_grad) for part in packed.detach().chunk(3)]
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            (weight, trains), bias = weights[i], module.in_proj_bias
            if bias is not None:
                bias = nn.Parameter(bias.detach().chunk(3)[i].clone(), bias.requires_grad)
            size = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
            setattr(new, name, self._made(BinaryLinear, size, weight, _latent(weight, trains), bias))
        new.out_proj = self._layer(module.out_proj)  # type: ignore[assignment]
        return new

    def _made(
        self,
        kind: type[BinaryLayer],
        arguments: dict[str, Any],
        weight: Tensor,
        latent: nn.Parameter,
        bias: nn.Parameter | None,
    ) -> BinaryLayer:
        scale: Scale = True
        if self.scale == "mean":
            scale = weight.abs().flatten(1).mean(1)
        elif not isinstance(self.scale, str):
            scale = float(self.scale)
        layer = kind(**arguments, device="meta", scale=scale)  # no values are drawn
        layer.weight, layer.bias = latent, bias
        if isinstance(scale, Tensor):
            layer.scale = scale
        return layer


def _latent(weight: Tensor, requires_grad: bool) -> nn.Parameter:
    """Latent weights with the signs of ``weight`` and with its magnitudes, the largest made 0.01."""
    real = weight.to(torch.promote_types(weight.dtype, torch.float32))
    size = real.abs() * (LARGEST / real.abs().max().clamp(min=torch.finfo(real.dtype).tiny))
    # A magnitude that rounds to zero would lose its sign.
    latent = spins_of(real) * size.clamp_(min=torch.finfo(real.dtype).tiny)
    return nn.Parameter(latent.contiguous(), requires_grad)


def _avoid_nested_tensors(module: nn.Module) -> None:
    """Keep torch's encoder from nested tensors, with which it reads the weights of its first layer itself."""
    if isinstance(module, nn.TransformerEncoder) and binary_parameters(module):
        module.use_nested_tensor = False
