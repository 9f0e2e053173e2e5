"""Which networks are trained in C on a CPU: linear layers in a row, with or without a ReLU behind each but the last."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from ..core.space import Space
from ..core.task import WithFeatures
from .cpu import compiler
from .cpu.dense import SOURCE, DenseKernel


class LayerRow(nn.Sequential):
    """Layers one after the other, a linear one last, whose forward pass gives (output, features)."""


def dense_kernel(module: nn.Module, space: Space) -> DenseKernel | None:
    """What computes a network's gradients and steps in C; None where it has other layers, or C cannot be had."""
    places = dict(zip(space.shapes, accumulate(space.sizes, initial=0), strict=False))
    table = list[list[int]]()
    for name, layer in dense_layers(module):
        if isinstance(layer, nn.Linear):
            weight, bias = places[f"{name}.weight"], places.get(f"{name}.bias", -1)
            table.append([layer.in_features, layer.out_features, weight, bias, 0])
        elif table:
            table[-1][4] = 1
        else:  # a ReLU before all linear layers
            return None
    if not table or table[-1][4] or space.device.type != "cpu" or space.dtype not in (torch.float32, torch.float64):
        return None
    functions = compiler.library(SOURCE, space.dtype)
    return DenseKernel(functions, table, space.dtype) if functions else None


def dense_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers after `nn.Flatten`, if the network is that and then linear layers and ReLUs in a row; else []."""
    wrapped = isinstance(module, WithFeatures) and type(module.module) is nn.Sequential
    row = module.module if isinstance(module, WithFeatures) and wrapped else module
    prefix = "module." if wrapped else ""
    layers = [(f"{prefix}{name}", layer) for name, layer in row._modules.items() if layer is not None]
    shared = len(dict(row.named_parameters())) < len(dict(row.named_parameters(remove_duplicate=False)))
    if shared or has_hooks(module) or not layers or not (wrapped or isinstance(row, LayerRow)):
        return []
    (_, first), *rest = layers
    known = flattens(first) and all(type(layer) is nn.ReLU or is_linear(layer) for _, layer in rest)
    return rest if known else []


def has_hooks(module: nn.Module) -> bool:
    """Does a layer do more than its class says? Kernels would not know of it."""
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    of_all = nn.modules.module
    if any(getattr(of_all, f"_global_{name}") for name in names):
        return True
    return any("forward" in vars(m) or any(getattr(m, f"_{name}") for name in names) for m in module.modules())


def flattens(layer: nn.Module) -> bool:
    """Does the layer make all but the batch flat?"""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def is_linear(layer: nn.Module) -> bool:
    """Is it a linear layer whose weights are trained and have its sizes, with nothing put in their place?"""
    if type(layer) is not nn.Linear:
        return False
    shapes = {"weight": [layer.out_features, layer.in_features]}
    shapes |= {} if layer.bias is None else {"bias": [layer.out_features]}
    own = dict(layer.named_parameters())
    return {name: [*p.shape] for name, p in own.items()} == shapes and all(p.requires_grad for p in own.values())
