"""A network's layers in a row: several of them at once where a kernel does that, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import batched_linear, batched_lstm
from .cpu import conv as cpu_conv
from .cuda import conv as cuda_conv
from .cuda import group_norm

LEAST_IMAGE_NUMBERS = 2**14  # numbers in a batch of images; fewer are not worth another memory layout
ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def uses_onednn() -> bool:
    """Will torch use oneDNN? It switches it off for good where a product in bfloat16 fails, as on some ARM machines."""
    return ONEDNN and bool(torch._C._get_mkldnn_enabled())


def run_layers(x: Tensor, layers: Sequence[nn.Module], used: set[str], pooled: bool = False) -> Tensor:
    """The output of the layers. `pooled`: every convolution is pooled, so that a layout of images may pay."""
    if pooled and wants_layout(x, layers):
        return run_in_layout(x, layers, used)
    k = 0
    while k < len(layers):
        x, count = run_some(x, layers[k:], used)
        k += count
    return x


def run_some(x: Tensor, layers: Sequence[nn.Module], used: set[str]) -> tuple[Tensor, int]:
    """The output of the first layers, as many as can be run at once, and their number."""
    compiling = torch.compiler.is_compiling()
    first, second = layers[0], layers[1] if len(layers) > 1 else None
    if len(layers) > 2 and not compiling:
        conv, relu, pool = layers[:3]
        if cpu_conv.can_run(x, conv, relu, pool):
            used.add("C (convolutions)")
            return cpu_conv.conv_relu_pool(x, conv), 3
        if cuda_conv.can_run(x, conv, relu, pool):
            used.add("CUDA (convolutions)")
            return cuda_conv.conv_relu_pool(x, conv), 3
    if batched_linear.is_batched(first, x):
        relu_follows = type(second) is nn.ReLU
        if x.is_cuda:
            used.add("Triton (linear layers)")
        return batched_linear.linear(x, first, relu_follows), 1 + relu_follows
    if group_norm.can_run(x, first):
        relu_follows = type(second) is nn.ReLU
        used.add("Triton (group norm)")
        return group_norm.norm_relu(x, first, relu_follows), 1 + relu_follows
    if isinstance(first, (nn.LSTM, nn.Embedding)) and (y := batched_lstm.run_layer(x, first, used)) is not None:
        return y, 1
    if type(first) is nn.ReLU and type(second) is nn.MaxPool2d:
        return first(second(x)), 2  # the same values and gradients in either order, and so of a quarter of the pixels
    return first(x), 1


def wants_layout(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Is this a batch of images on a CPU that torch's own convolutions will take, one network at a time?"""
    return (
        x.device.type == "cpu"
        and x.dim() == 4
        and x.numel() >= LEAST_IMAGE_NUMBERS
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
        and not cpu_conv.can_run(x, *layers[:3])
    )


def run_in_layout(x: Tensor, layers: Sequence[nn.Module], used: set[str]) -> Tensor:
    """The same with images in memory as is fast there: in oneDNN's own layout, which changes no number, or channels-
    last.

    Without it, on an x86 core that has no C, a local step of cnn, lenet and cnn64 on 50 images takes 2.0, 1.2 and 1.4
    times as long, and evaluation 2 to 4 times; with C, which takes no norm, a step of cnn with one 1.4 times.
    """
    flat = next(k for k, layer in enumerate(layers) if isinstance(layer, nn.Flatten))
    plain = all(isinstance(layer, (nn.Conv2d, nn.ReLU, nn.MaxPool2d)) for layer in layers[:flat])
    if plain and x.dtype == torch.float32 and uses_onednn() and not torch.is_autocast_enabled("cpu"):
        return run_layers(run_layers(x.to_mkldnn(), layers[:flat], used).to_dense(), layers[flat:], used)
    # cloned, since one channel counts as last already, wherever its stride says it is
    channels_last = x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
    return run_layers(channels_last, layers, used)
