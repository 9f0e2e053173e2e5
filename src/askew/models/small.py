"""Small networks. Every module returns (logits, features), where features [B, f] are the input of its last layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.settings import Settings, setting
from ..errors import ConfigError, ModelError

NORMS = ("none", "batch", "group")
GROUPS = 2


class Chain(nn.Sequential):
    """Named layers in a row; the last one is called out."""

    def forward(self, x: Tensor, call: str = "") -> tuple[Tensor, ...]:
        """Logits and features; `call` names another method to run, since only forward can be run with other weights."""
        if call == "transfer":
            return self.transfer(x)
        *body, out = self
        for layer in body:
            x = layer(x)
        return out(x), x

    def transfer(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, then the last hidden layer's input [B, c, 1] and its output at full and at a quarter of its width.

        The narrow output starts from the detached input, so that its gradient belongs to that layer alone; it leaves
        running statistics as the full pass left them.
        """
        *body, out = self
        linear = [k for k, layer in enumerate(body) if isinstance(layer, nn.Linear)]
        if not linear:
            raise ModelError("this network has no hidden layer whose transfer could be measured; use mlp, cnn or lenet.")
        for layer in body[: linear[-1]]:
            x = layer(x)
        full, narrow = x, x.detach()
        for layer in body[linear[-1] :]:
            full, narrow = layer(full), again(layer, narrow)
        return out(full), x[..., None], full[..., None], narrow[:, : max(1, full.shape[1] // 4), None]


def again(layer: nn.Module, x: Tensor) -> Tensor:
    """A second pass of the same batch through a layer, which batch norm must not count twice."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    return layer(x)  # type: ignore[no-any-return]


class Network(Settings):
    """A network by its settings; the base of all of them."""

    idea: ClassVar[str] = ""

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A fresh module for inputs of this shape (without the batch); classes = 0, a regression, gives one output."""
        raise NotImplementedError


def chain(layers: Iterator[tuple[str, nn.Module]]) -> Chain:
    """The layers in a row, each under its name."""
    whole = Chain()
    for name, layer in layers:
        whole.add_module(name, layer)
    return whole


def dense(shape: tuple[int, ...], hidden: tuple[int, ...], classes: int, norm: str) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers on the flattened input, with ReLU between them."""
    inputs = math.prod(shape)
    if inputs < 1:
        raise ModelError(f"a network needs inputs of at least one number, got shape {list(shape)}; check the dataset.")
    yield "flat", nn.Flatten()
    for k, width in enumerate(hidden, 1):
        yield f"fc{k}", nn.Linear(inputs, width)
        if norm != "none":
            yield f"fc_norm{k}", nn.BatchNorm1d(width) if norm == "batch" else nn.GroupNorm(GROUPS, width)
        yield f"fc_relu{k}", nn.ReLU()
        inputs = width
    yield "out", nn.Linear(inputs, classes or 1)


def convolved(
    shape: tuple[int, ...], channels: tuple[int, ...], kernel: int, padding: int, hidden: tuple[int, ...], classes: int, norm: str
) -> Iterator[tuple[str, nn.Module]]:
    """Convolutions, each with normalisation, ReLU and 2×2 max-pooling, then linear layers."""
    inputs, height, width = shape
    for k, count in enumerate(channels, 1):
        yield f"conv{k}", nn.Conv2d(inputs, count, kernel, padding=padding)
        if norm != "none":
            yield f"norm{k}", nn.BatchNorm2d(count) if norm == "batch" else nn.GroupNorm(GROUPS, count)
        yield f"relu{k}", nn.ReLU()
        yield f"pool{k}", nn.MaxPool2d(2)
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        inputs = count
    yield from dense((inputs, height, width), hidden, classes, "none")


def need_image(network: str, shape: tuple[int, ...]) -> None:
    """Refuse what two rounds of 2×2 pooling cannot take."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ModelError(
            f"{network} needs images [channels, height, width] of 4×4 pixels or more, got inputs of shape {list(shape)}; "
            "use mlp or softmax, which take any shape."
        )


class Softmax(Network):
    """Softmax regression: one linear layer on the flattened input."""

    idea: ClassVar[str] = "softmax regression: one linear layer; convex"
    zeros: bool = setting("start at zero", default=True)

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        network = chain(dense(shape, (), classes, "none"))
        if self.zeros:
            for parameter in network.parameters():
                nn.init.zeros_(parameter)
        return network


class MLP(Network):
    """Fully connected layers with ReLU on the flattened input."""

    idea: ClassVar[str] = "fully connected layers with ReLU"
    hidden: tuple[int, ...] = setting("widths of the hidden layers", default=(64,))
    norm: str = setting("normalisation before each ReLU; group: two groups", default="none", choices=NORMS)

    def check(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"MLP: hidden must be one width ≥ 1 or several, got {list(self.hidden)}; without hidden layers, use softmax.")
        if self.norm == "group" and any(width % GROUPS or width < 2 * GROUPS for width in self.hidden):
            raise ConfigError(f'MLP: norm = "group" needs even widths ≥ {2 * GROUPS}, got hidden = {list(self.hidden)}; try [64].')

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return chain(dense(shape, self.hidden, classes, self.norm))


class CNN(Network):
    """Two 3×3 convolutions and one hidden linear layer of 64, for small images."""

    idea: ClassVar[str] = "two 3×3 convolutions and a hidden layer, for images of 8×8 to 32×32"
    width: int = setting("channels of the first convolution; the second has twice as many", default=16, least=1)
    norm: str = setting("normalisation after each convolution; group: two groups", default="none", choices=NORMS)

    def check(self) -> None:
        if self.norm == "group" and self.width % GROUPS:
            raise ConfigError(f'CNN: norm = "group" needs an even width, got {self.width}; try {self.width + 1}.')

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        need_image("cnn", shape)
        return chain(convolved(shape, (self.width, 2 * self.width), 3, 1, (64,), classes, self.norm))


class LeNet(Network):
    """LeNet5 with ReLU and max-pooling: 5×5 convolutions of 6 and 16 channels, linear layers of 120 and 84.

    Images below 16×16 are padded by 2 in both convolutions, larger ones not at all.
    """

    idea: ClassVar[str] = "LeNet5 with ReLU and max-pooling; 62,006 parameters on CIFAR-10"
    norm: str = setting("normalisation after each convolution; group: two groups", default="none", choices=NORMS)

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        need_image("lenet", shape)
        return chain(convolved(shape, (6, 16), 5, 2 if min(shape[1:]) < 16 else 0, (120, 84), classes, self.norm))
