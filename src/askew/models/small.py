"""Small networks: layers in a row, for any input or for small images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from ..core.settings import setting
from ..errors import ConfigError, ModelError
from .network import GROUPS, Network, PooledConvolutions, make_chain, norm_layer, require_image

NORMS = ("none", "batch", "group")


def linear_layers(
    shape: tuple[int, ...], hidden: tuple[int, ...], classes: int, norm: str
) -> Iterator[tuple[str, nn.Module]]:
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


def convolution_layers(
    shape: tuple[int, ...],
    channels: tuple[int, ...],
    kernel: int,
    paddings: tuple[int, ...],
    hidden: tuple[int, ...],
    classes: int,
    norm: str,
) -> Iterator[tuple[str, nn.Module]]:
    """Convolutions, each with normalisation, ReLU and 2×2 max-pooling, then linear layers."""
    inputs, height, width = shape
    for k, (count, padding) in enumerate(zip(channels, paddings, strict=True), 1):
        yield f"conv{k}", nn.Conv2d(inputs, count, kernel, padding=padding)
        if norm != "none":
            yield f"norm{k}", norm_layer(norm, count)
        yield f"relu{k}", nn.ReLU()
        yield f"pool{k}", nn.MaxPool2d(2)
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        inputs = count
    yield from linear_layers((inputs, height, width), hidden, classes, "none")


class Softmax(Network):
    """Softmax regression: one linear layer on the flattened input."""

    idea: ClassVar[str] = "softmax regression: one linear layer; convex"
    zeros: bool = setting("start at zero; a projection head and what follows it start as drawn", default=True)

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        network = make_chain(linear_layers(shape, (), classes, "none"))
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
        super().check()
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(
                f"MLP: hidden must be one width ≥ 1 or several, got {list(self.hidden)}; without hidden layers, use "
                "softmax."
            )
        if self.norm == "group" and any(width % GROUPS or width < 2 * GROUPS for width in self.hidden):
            raise ConfigError(
                f'MLP: norm = "group" needs even widths ≥ {2 * GROUPS}, got hidden = {list(self.hidden)}; try [64].'
            )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return make_chain(linear_layers(shape, self.hidden, classes, self.norm))


class CNN(Network):
    """Two 3×3 convolutions and one hidden linear layer of 64, for small images."""

    idea: ClassVar[str] = "two 3×3 convolutions and a hidden layer, for images of 8×8 to 32×32"
    width: int = setting("channels of the first convolution; the second has twice as many", default=16, least=1)
    norm: str = setting("normalisation after each convolution; group: two groups", default="none", choices=NORMS)

    def check(self) -> None:
        super().check()
        if self.norm == "group" and self.width % GROUPS:
            raise ConfigError(f'CNN: norm = "group" needs an even width, got {self.width}; try {self.width + 1}.')

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        require_image("cnn", shape)
        return make_chain(
            convolution_layers(shape, (self.width, 2 * self.width), 3, (1, 1), (64,), classes, self.norm),
            PooledConvolutions,
        )


class ConvNet(Network):
    """3×3 convolutions, each with ReLU and 2×2 max-pooling, and linear layers with ReLU between them."""

    idea: ClassVar[str] = "any number of 3×3 convolutions with max-pooling, then linear layers"
    channels: tuple[int, ...] = setting("channels of the convolutions", default=(32, 32))
    hidden: tuple[int, ...] = setting("widths of the hidden linear layers; may be none", default=(256, 64))
    padding: int = setting("pixels of padding around each convolution", default=1, least=0, most=2)
    norm: str = setting(
        "normalisation after each convolution; group: two groups; instance: each channel by itself",
        default="none",
        choices=(*NORMS, "instance"),
    )
    init: str = setting(
        "initial weights; kaiming: He's normal ones and biases of 0, the last layer as torch draws it",
        default="torch",
        choices=("torch", "kaiming"),
    )

    def check(self) -> None:
        super().check()
        if not self.channels or min(*self.channels, *self.hidden, 1) < 1:
            raise ConfigError(
                f"ConvNet: channels must be one number ≥ 1 or several, and hidden widths ≥ 1, got channels = "
                f"{list(self.channels)} and hidden = {list(self.hidden)}; try channels = [32, 32]."
            )
        if self.norm == "group" and any(count % GROUPS for count in self.channels):
            raise ConfigError(f'ConvNet: norm = "group" needs even channels, got {list(self.channels)}; try [32, 32].')

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        require_image("convnet", shape)
        side, paddings = min(shape[1:]), (self.padding,) * len(self.channels)
        for padding in paddings:
            side = (side + 2 * padding - 2) // 2
            if side < 1:
                raise ModelError(
                    f"convnet: images of shape {list(shape)} are too small for {len(self.channels)} convolutions with "
                    "max-pooling; set fewer model.channels, or a larger model.padding."
                )
        layers = convolution_layers(shape, self.channels, 3, paddings, self.hidden, classes, self.norm)
        network = make_chain(layers, PooledConvolutions)
        for layer in list(network)[:-1] if self.init == "kaiming" else ():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        return network


class LeNet(Network):
    """LeNet5 with ReLU and max-pooling: 5×5 convolutions of 6 and 16 channels, linear layers of 120 and 84.

    Images below 16×16 are padded by 2 in both convolutions, larger ones only as `padding` says.
    """

    idea: ClassVar[str] = "LeNet5 with ReLU and max-pooling; 62,006 parameters on CIFAR-10"
    channels: ClassVar[tuple[int, ...]] = (6, 16)
    hidden: ClassVar[tuple[int, ...]] = (120, 84)
    norm: str = setting("normalisation after each convolution; group: two groups", default="none", choices=NORMS)
    padding: int = setting(
        "pixels of padding around the first convolution, 2 in the textbook's for 28×28", default=0, least=0, most=4
    )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        require_image(self.display_name().lower(), shape)
        needed = 2 if min(shape[1:]) < 16 else 0
        return make_chain(
            convolution_layers(
                shape, self.channels, 5, (max(self.padding, needed), needed), self.hidden, classes, self.norm
            ),
            PooledConvolutions,
        )


class CNN64(LeNet):
    """Two 5×5 convolutions of 64 channels with ReLU and max-pooling, linear layers of 384 and 192.

    Images below 16×16 are padded by 2 in both convolutions, larger ones only as `padding` says.
    """

    idea: ClassVar[str] = (
        "LeNet with 64 channels and linear layers of 384 and 192, as FedDC's; 797,962 parameters on CIFAR-10"
    )
    channels: ClassVar[tuple[int, ...]] = (64, 64)
    hidden: ClassVar[tuple[int, ...]] = (384, 192)


class LeNetPMVR(Network):
    """LeNet as in FedPMVR's code: tanh, average pooling, and a layer of 120 at each position before the one of 84."""

    idea: ClassVar[str] = (
        "LeNet with tanh and average pooling as in FedPMVR's code; 164,116 parameters on 28×28 grey images"
    )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        require_image("lenet_pmvr", shape, 16, "lenet for smaller images, mlp for what is no image")
        return make_chain(self.layers(shape, classes))

    def layers(self, shape: tuple[int, ...], classes: int) -> Iterator[tuple[str, nn.Module]]:
        inputs, height, width = shape
        for k in (1, 2):
            yield f"conv{k}", nn.Conv2d(inputs, 6, 5)
            yield f"tanh{k}", nn.Tanh()
            yield f"pool{k}", nn.AvgPool2d(2)
            inputs, height, width = 6, (height - 4) // 2, (width - 4) // 2
        yield "each", nn.Conv2d(inputs, 120, 1)  # a linear layer 6 → 120 at each position
        yield "tanh3", nn.Tanh()
        yield "flat", nn.Flatten()
        yield "fc", nn.Linear(120 * height * width, 84)
        yield "tanh4", nn.Tanh()
        yield "out", nn.Linear(84, classes or 1)
