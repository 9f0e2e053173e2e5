"""Residual networks. Layers have torchvision's names: its weights load into stem = "imagenet", norm = "batch"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.settings import setting
from ..errors import ConfigError
from .network import (
    GROUPS,
    Chain,
    Network,
    UsesKernels,
    first_quarter,
    make_chain,
    norm_layer,
    require_image,
    run_narrow,
)

NARROWEST = 64  # channels
STEMS = ("small", "imagenet")

Norm = Callable[[int], nn.Module]


class ResidualBlock(UsesKernels, nn.Module):
    """Two convolutions, or three of a bottleneck, each with its normalisation, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        plan = (
            [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
            if bottleneck
            else [(3, width, stride), (3, width, 1)]
        )
        self.depth, outputs = len(plan), inputs
        for k, (kernel, count, step) in enumerate(plan, 1):
            self.add_module(f"conv{k}", nn.Conv2d(outputs, count, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{k}", norm(count))
            outputs = count
        same = stride == 1 and inputs == outputs
        self.downsample = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__) -> Tensor:
        """`run` may run the layers at less than their width."""
        y, shortcut = x, x
        if self.kernels is not None and run is nn.Module.__call__:
            shortcut = self.kernels.run_layers(x, list(self.downsample.children()))
        else:
            for layer in self.downsample.children():
                shortcut = run(layer, shortcut)
        for k in range(1, self.depth + 1):
            y, norm = run(self.get_submodule(f"conv{k}"), y), self.get_submodule(f"bn{k}")
            y = self.norm_relu(y, norm, shortcut if k == self.depth else None, run)
        return y

    def norm_relu(
        self, y: Tensor, norm: nn.Module, shortcut: Tensor | None, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> Tensor:
        """relu(norm(y) + shortcut)."""
        if self.kernels is not None and run is nn.Module.__call__:
            fused = self.kernels.norm_relu(y, norm, shortcut)
            if fused is not None:
                return fused
        y = run(norm, y)
        return F.relu(y if shortcut is None else y + shortcut)


def run_narrow_stage(stage: nn.Module, x: Tensor) -> Tensor:
    """The output of a stage's first quarter of channels in every layer."""
    for block in stage.children():
        x = block(x, run_narrow)
    return x


class Residual(Chain):
    """A chain whose block is layer4, the last stage."""

    def transfer(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, the last stage's input and output [B, c, s], and both once more at a quarter of their width.

        The inputs are averaged to the size of the outputs.
        """
        *body, out = self.named_children()
        seen: tuple[Tensor, ...] = ()
        for name, layer in body:
            before, x = x, layer(x)
            if name == "layer4":
                narrow = run_narrow_stage(layer, first_quarter(before.detach()))
                before = F.adaptive_avg_pool2d(before, (x.shape[2], x.shape[3]))
                seen = (before, x, first_quarter(before), narrow)
        return (out[1](x), *(t.flatten(2) for t in seen))


class ResNet(Network):
    """Stages of residual blocks of 64, 128, 256 and 512 channels (bottlenecks end with four times as many).

    The small-image stem is a 3×3 convolution; the ImageNet one a 7×7 convolution of stride 2 and max-pooling.
    """

    blocks: ClassVar[tuple[int, ...]] = ()
    bottleneck: ClassVar[bool] = False
    norm: str = setting("normalisation after each convolution", default="group", choices=("group", "batch"))
    groups: int = setting('groups of channels of norm = "group"', default=GROUPS, least=1, most=NARROWEST)
    stem: str = setting("first layers; small: for images of up to 64×64", default="small", choices=STEMS)

    def check(self) -> None:
        super().check()
        if NARROWEST % self.groups:
            raise ConfigError(
                f"{self.display_name()}: groups must divide {NARROWEST} channels, got {self.groups}; try 2 or 32."
            )

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        name = self.display_name().lower()
        if self.stem == "small":
            require_image(name, shape, 8)
        else:
            require_image(
                f'{name} with stem = "imagenet"',
                shape,
                32,
                'stem = "small" for images from 8×8, mlp for what is no image',
            )
        return make_chain(self.layers(shape[0], classes), Residual)

    def layers(self, channels: int, classes: int) -> Iterator[tuple[str, nn.Module]]:
        norm, inputs = partial(norm_layer, self.norm, groups=self.groups), NARROWEST
        small = self.stem == "small"
        yield "conv1", nn.Conv2d(channels, inputs, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        yield "bn1", norm(inputs)
        yield "relu", nn.ReLU()
        if not small:
            yield "maxpool", nn.MaxPool2d(3, 2, 1)
        for k, count in enumerate(self.blocks, 1):
            width, stage = NARROWEST * 2 ** (k - 1), nn.Sequential()
            for b in range(count):
                stage.append(ResidualBlock(inputs, width, 2 if k > 1 and b == 0 else 1, self.bottleneck, norm))
                inputs = 4 * width if self.bottleneck else width
            yield f"layer{k}", stage
        yield "avgpool", nn.AdaptiveAvgPool2d(1)
        yield "flat", nn.Flatten()
        yield "fc", nn.Linear(inputs, classes or 1)


class ResNet18(ResNet):
    """Four stages of two blocks of two 3×3 convolutions."""

    idea: ClassVar[str] = "ResNet18 with group norm or batch norm, for images; 11 million parameters"
    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class ResNet50(ResNet):
    """Stages of 3, 4, 6 and 3 blocks of 1×1, 3×3 and 1×1 convolutions."""

    idea: ClassVar[str] = "ResNet50 with group norm or batch norm, for images; 24 million parameters"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    bottleneck: ClassVar[bool] = True
