"""What all networks share: (logits, features), a projection head if asked for, and weights from a file.

Every module returns (logits, features), where features [B, f] are the input of its last layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.settings import Settings, setting
from ..core.space import BATCH_NORMS
from ..core.task import Row
from ..errors import ConfigError, ModelError
from . import conv, fused, linears
from .weights import HEAD, start_from

GROUPS = 2


class Chain(Row):
    """Named layers in a row, a linear one last."""

    fused = False  # convolution, ReLU and pooling as suits the device: by one kernel where that is possible

    def forward(self, x: Tensor, call: str = "") -> tuple[Tensor, ...]:
        """Logits and features; `call` names another method to run, since only forward can be run with other weights."""
        if call == "transfer":
            return self.transfer(x)
        *body, out = self
        x = self.through(x, body)
        return linears.linear(x, out) if linears.many(out, x) else out(x), x

    def through(self, x: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        """One layer after the other, or two or three at once."""
        k = 0
        while k < len(layers):
            if self.fused and k + 2 < len(layers) and conv.fits(x, *layers[k : k + 3]):
                x = conv.conv_relu_pool(x, cast(nn.Conv2d, layers[k]))
                k += 3
            elif self.fused and k + 2 < len(layers) and fits(x, layers[k : k + 3]):
                x = fused.conv_relu_pool(x, cast(nn.Conv2d, layers[k]))
                k += 3
            elif linears.many(layers[k], x):
                relu = k + 1 < len(layers) and type(layers[k + 1]) is nn.ReLU
                x = linears.linear(x, layers[k], relu)
                k += 1 + relu
            elif type(layers[k]) is nn.ReLU and k + 1 < len(layers) and type(layers[k + 1]) is nn.MaxPool2d:
                x = layers[k](
                    layers[k + 1](x)
                )  # the same values and slopes in either order, and here of a quarter of the pixels
                k += 2
            else:
                x = layers[k](x)
                k += 1
        return x

    def transfer(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, then the last hidden layer's input [B, c, 1] and its output at full and at a quarter of its width.

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
        full, narrow = x, x.detach()
        for layer in body[linear[-1] :]:
            full, narrow = layer(full), again(layer, narrow)
        return out(full), x[..., None], full[..., None], narrow[:, : max(1, full.shape[1] // 4), None]


def fits(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Can kernels for CUDA take these three layers at once?"""
    many = torch._C._functorch.is_batchedtensor(x)
    return x.is_cuda and x.dtype != torch.float64 and fused.fits(*layers, many=many)


def fuse(module: nn.Module) -> None:
    """Compute convolution, ReLU and pooling as suits the device."""
    for layer in module.modules():
        if isinstance(layer, Chain):
            layer.fused = True


def again(layer: nn.Module, x: Tensor) -> Tensor:
    """A second pass of the same batch through a layer, which batch norm must not count twice."""
    if isinstance(layer, BATCH_NORMS) and layer.training:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    return layer(x)  # type: ignore[no-any-return]


def chain(layers: Iterator[tuple[str, nn.Module]], kind: type[Chain] = Chain) -> Chain:
    """The layers in a row, each under its name."""
    whole = kind()
    for name, layer in layers:
        whole.add_module(name, layer)
    return whole


def project(module: nn.Module, width: int) -> None:
    """Put MOON's projection head before the last layer: f → f, ReLU, f → width; the last layer is drawn anew to fit."""
    if not isinstance(module, nn.Sequential) or not len(module) or not isinstance(last := module[-1], nn.Linear):
        raise ModelError(
            f"model.head = {width} needs a network whose layers stand in a row (nn.Sequential) and end with a linear one, "
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

    idea: ClassVar[str] = ""
    head: int = setting("width of a projection head before the last layer, MOON's is 256; 0: none", default=0, least=0)
    weights: str = setting("start from the weights in this file: safetensors, or a torch state dict", default="")
    new_head: bool = setting(
        "leave the last layer (and the projection head) as drawn where the file has none of this shape: for another number of classes",
        default=False,
    )

    seed: int | None = setting("seed of the weights that are drawn; left out: the run's", default=None, least=0)

    def check(self) -> None:
        if self.new_head and not self.weights:
            raise ConfigError(
                f"{self.called()}: new_head = true is about model.weights, which is not set; set it, or leave new_head out."
            )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A fresh module for inputs of this shape (without the batch); classes = 0, a regression, gives one output."""
        raise NotImplementedError

    def build_module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module with its projection head and the weights to start from."""
        module = self.module(shape, classes)
        if self.head or self.weights:
            module = copy.deepcopy(module)  # one handed in from Python stays as it is
        if self.head:
            project(module, self.head)
        if self.weights:
            start_from(module, self.weights, self.new_head)
        return module

    def reads(self) -> tuple[Path, ...]:
        """The files that the network depends on."""
        return (Path(self.weights),) if self.weights else ()


def normed(norm: str, channels: int, groups: int = GROUPS) -> nn.Module:
    """Normalisation over the channels of images: "batch" or "group"."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(groups, channels)


def need_image(
    network: str, shape: tuple[int, ...], least: int = 4, instead: str = "mlp or softmax, which take any shape"
) -> None:
    """Refuse what is no image, or too small for the network's strides."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"{network} needs images [channels, height, width] of {least}×{least} pixels or more, got inputs of shape {list(shape)}; "
            f"use {instead}."
        )
