"""What all networks share: (logits, features), a projection head if asked for, and weights from a file.

Every module returns (logits, features), where features [B, f] are the input of its last layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.settings import Settings, require_arguments, setting
from ..core.space import BATCH_NORMS
from ..errors import ConfigError, ModelError
from ..kernels.dense import LayerRow, has_hooks
from ..kernels.interface import Kernels
from .weights import HEAD, load_weights

GROUPS = 2


class UsesKernels:
    """A module whose layers may be run several at once."""

    kernels: Kernels | None = None


class Chain(UsesKernels, LayerRow):
    """Named layers in a row, a linear one last."""

    pooled = False  # is every convolution pooled?

    def forward(self, x: Tensor, call: str = "") -> tuple[Tensor, ...]:
        """Logits and features; `call` names another method to run, since only forward can be run with other weights."""
        if call == "transfer":
            return self.transfer(x)
        *body, out = self
        features = self.run_layers(x, body)
        return self.run_layers(features, [out]), features

    def run_layers(self, x: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        """The output of some layers."""
        if self.kernels is not None:
            return self.kernels.run_layers(x, layers, self.pooled and len(layers) > 1)
        for layer in layers:
            x = layer(x)
        return x

    def transfer(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, the last hidden layer's input and output [B, c, 1], and both once more at a quarter of their width.

        The narrow output starts from the detached input, so that its gradient belongs to that layer alone; it leaves
        running statistics as the full pass left them.
        """
        *body, out = self
        linear = [k for k, layer in enumerate(body) if isinstance(layer, nn.Linear)]
        if not linear:
            raise ModelError(
                "this network has no hidden layer whose transfer could be measured; use mlp, cnn, lenet or resnet18."
            )
        for layer in body[: linear[-1]]:
            x = layer(x)
        full, narrow = x, first_quarter(x.detach())
        before = full, narrow
        for layer in body[linear[-1] :]:
            full, narrow = layer(full), run_narrow(layer, narrow)
        return out(full), *(t[..., None] for t in (before[0], full, before[1], narrow))


class PooledConvolutions(Chain):
    """A chain in which every convolution is pooled."""

    pooled = True


def use_kernels(module: nn.Module, kernels: Kernels) -> nn.Module:
    """A copy of the network that may run its layers by kernels."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, UsesKernels) and not has_hooks(layer):
            layer.kernels = kernels
    return module


def first_quarter(x: Tensor) -> Tensor:
    """The first quarter of the channels [B, c, …], at least one."""
    return x[:, : max(1, x.shape[1] // 4)]


def run_narrow(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer's first quarter of outputs, from the first channels of its input.

    It is a batch's second pass through the layer, so batch norm does not count its statistics.
    """
    n = x.shape[1]
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        count = max(1, layer.weight.shape[0] // 4)
        weight, bias = layer.weight[:count, :n], None if layer.bias is None else layer.bias[:count]
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, layer.stride, layer.padding)
    if isinstance(layer, nn.GroupNorm):
        fewest = 2 if x.dim() == 2 else 1  # values of a group: of one there is no variance
        groups = [g for g in range(1, layer.num_groups + 1) if n % g == 0 and n // g >= fewest]
        if not groups:
            return x * layer.weight[:n] + layer.bias[:n]
        return F.group_norm(x, groups[-1], layer.weight[:n], layer.bias[:n], layer.eps)
    if isinstance(layer, BATCH_NORMS):
        mean, var = layer.running_mean, layer.running_var
        if layer.training or mean is None or var is None:
            return F.batch_norm(x, None, None, layer.weight[:n], layer.bias[:n], True, eps=layer.eps)
        return F.batch_norm(x, mean[:n], var[:n], layer.weight[:n], layer.bias[:n], False, eps=layer.eps)
    return layer(x)  # type: ignore[no-any-return]


def make_chain(layers: Iterator[tuple[str, nn.Module]], kind: type[Chain] = Chain) -> Chain:
    """The layers in a row, each under its name."""
    whole = kind()
    for name, layer in layers:
        whole.add_module(name, layer)
    return whole


def add_projection_head(module: nn.Module, width: int) -> None:
    """Put MOON's projection head before the last layer: f → f, ReLU, f → width; the last layer is drawn anew to fit."""
    if not isinstance(module, nn.Sequential) or not len(module) or not isinstance(last := module[-1], nn.Linear):
        raise ModelError(
            f"model.head = {width} needs a network whose layers stand in a row (nn.Sequential) and end with a linear "
            "one, "
            f"which {type(module).__name__} does not; leave head out, or write the head into the network."
        )
    name, f = next(reversed(module._modules)), last.in_features
    delattr(module, name)
    out = nn.Linear(width, last.out_features, bias=last.bias is not None)
    for key, layer in zip(
        (HEAD[0], "head_relu", HEAD[1], name), (nn.Linear(f, f), nn.ReLU(), nn.Linear(f, width), out), strict=True
    ):
        module.add_module(key, layer.to(last.weight))


class Network(Settings):
    """A network by its settings; the base of all of them."""

    idea: ClassVar[str] = ""  # what it is, in one line for the tables
    head: int = setting("width of a projection head before the last layer, MOON's is 256; 0: none", default=0, least=0)
    weights: str = setting("start from the weights in this file: safetensors, or a torch state dict", default="")
    new_head: bool = setting(
        "leave the last layer (and the projection head) as drawn where the file has none of this shape: for another "
        "number of classes",
        default=False,
    )

    seed: int | None = setting("seed of the weights that are drawn; left out: the run's", default=None, least=0)

    def check(self) -> None:
        if self.new_head and not self.weights:
            raise ConfigError(
                f"{self.display_name()}: new_head = true is about model.weights, which is not set; "
                "set it, or leave new_head out."
            )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A fresh module for inputs of this shape (without the batch); classes = 0, a regression, gives one output."""
        raise NotImplementedError

    def build_module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module with its projection head and the weights to start from."""
        require_arguments(self, "module")
        module = self.module(shape, classes)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"module() of the network {self.display_name()} must return an nn.Module, got {type(module).__name__}; "
                "end it with return and the network."
            )
        if self.head or self.weights:
            module = copy.deepcopy(module)  # one handed in from Python stays as it is
        if self.head:
            add_projection_head(module, self.head)
        if self.weights:
            load_weights(module, self.weights, self.new_head)
        return module

    def reads(self) -> tuple[Path, ...]:
        """The files that the network depends on."""
        return (Path(self.weights),) if self.weights else ()


def norm_layer(norm: str, channels: int, groups: int = GROUPS) -> nn.Module:
    """Normalisation over the channels of images: "batch", "group", or "instance", each channel by itself."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels if norm == "instance" else groups, channels)


def require_image(
    network: str, shape: tuple[int, ...], least: int = 4, instead: str = "mlp or softmax, which take any shape"
) -> None:
    """Refuse what is no image, or too small for the network's strides."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"{network} needs images [channels, height, width] of {least}×{least} pixels or more, got inputs of shape "
            f"{list(shape)}; "
            f"use {instead}."
        )
