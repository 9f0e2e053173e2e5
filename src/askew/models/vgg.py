"""VGG19 with the small classifier that images of 32×32 need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from ..core.settings import setting
from .network import Network, make_chain, norm_layer, require_image
from .small import linear_layers

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels and convolutions


class VGG19(Network):
    """Sixteen 3×3 convolutions with five max-poolings, then linear layers of 512, 512 and the classes.

    What is left of images above 32×32 is averaged over its positions. Without batch norm, torch's initial weights
    make the features of all images nearly equal (they differ by a ten-millionth): give it weights to start from.
    """

    idea: ClassVar[str] = "VGG19, with batch norm or without, for images from 32×32; 20.6 million parameters"
    norm: str = setting("normalisation after each convolution", default="batch", choices=("none", "batch"))

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        require_image("vgg19", shape, 32, "cnn or lenet for smaller images, mlp for what is no image")
        return make_chain(self.layers(shape[0], classes))

    def layers(self, inputs: int, classes: int) -> Iterator[tuple[str, nn.Module]]:
        k = 0
        for stage, (channels, depth) in enumerate(STAGES, 1):
            for _ in range(depth):
                k += 1
                yield f"conv{k}", nn.Conv2d(inputs, channels, 3, padding=1)
                if self.norm != "none":
                    yield f"norm{k}", norm_layer(self.norm, channels)
                yield f"relu{k}", nn.ReLU()
                inputs = channels
            yield f"pool{stage}", nn.MaxPool2d(2)
        yield "avgpool", nn.AdaptiveAvgPool2d(1)
        yield from linear_layers((inputs,), (512, 512), classes, "none")
