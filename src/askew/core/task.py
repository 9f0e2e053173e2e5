"""Task: the network and its criterion as functions of a flat w.

`Bound` ties a module's parameters to one flat buffer, so that a plain forward pass is a function of w at no cost:
the sequential engine's way. `Functional` calls the module with the parameters split from w: what vmap needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, did_you_mean
from . import entropy
from .dense import walk_of
from .space import Space
from .types import Batch

Output = tuple[Tensor, ...]  # output and features, in this order
SLOPES: dict[
    type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor], Tensor]
] = {  # (layer, slope behind it, its input, its output)
    nn.ReLU: lambda layer, g, x, y: torch.ops.aten.threshold_backward(g, y, 0),
    nn.Tanh: lambda layer, g, x, y: torch.ops.aten.tanh_backward(g, y),
    nn.Sigmoid: lambda layer, g, x, y: torch.ops.aten.sigmoid_backward(g, y),
    nn.GELU: lambda layer, g, x, y: torch.ops.aten.gelu_backward(g, x, approximate=layer.approximate),
    nn.Identity: lambda layer, g, x, y: g,
}
Criterion = Callable[[Tensor, Tensor], Tensor]  # (output, y) → loss of each sample [B]

CRITERIA: dict[str, Criterion] = {
    "cross_entropy": lambda output, y: F.cross_entropy(output, y, reduction="none"),
    "squared_error": lambda output, y: 0.5 * (output - y).square().flatten(1).sum(1),
}


class WithFeatures(nn.Module):
    """A user's module whose forward gives an output alone: the features are the input of its last layer with weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        weighty = [n for n, m in module.named_modules() if n and next(m.parameters(recurse=False), None) is not None]
        self.last = weighty[-1] if weighty else ""

    def forward(self, x: Tensor) -> Output:
        seen: list[Tensor] = []
        see = lambda layer, inputs: seen.append(
            inputs[0]
        )  # hung up for one call, so that copies of the module hold no hook
        hook = self.module.get_submodule(self.last).register_forward_pre_hook(see)
        try:
            output = self.module(x)
        finally:
            hook.remove()
        return output, seen[-1].flatten(1)


def with_features(module: nn.Module, example: Tensor) -> nn.Module:
    """The module itself if its forward gives (output, features) already."""
    probe = copy.deepcopy(module).eval()
    with torch.no_grad():
        output = probe(example)
    return WithFeatures(module) if isinstance(output, Tensor) else module


class Row(nn.Sequential):
    """Layers one after the other, a linear one last, whose forward pass gives (output, features)."""


def dense_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a row that makes an input flat and goes on with linear ones and elementwise functions; of anything else none."""
    plain = isinstance(module, WithFeatures) and type(module.module) is nn.Sequential
    row = module.module if isinstance(module, WithFeatures) and plain else module
    layers = [(f"module.{name}" if plain else name, layer) for name, layer in row._modules.items() if layer is not None]
    shared = len(dict(row.named_parameters())) < len(dict(row.named_parameters(remove_duplicate=False)))
    known = bool(layers) and flat(layers[0][1]) and all(elementwise(layer) or linear(layer) for _, layer in layers[1:])
    return layers if known and not shared and (plain or isinstance(row, Row)) else []


def flat(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def elementwise(layer: nn.Module) -> bool:
    """Is its slope known, and its input left as it was?"""
    return type(layer) in SLOPES and not getattr(layer, "inplace", False)


def linear(layer: nn.Module) -> bool:
    """Is it a linear layer with weights that are trained and nothing put in their place?"""
    own = dict(layer.named_parameters())
    return type(layer) is nn.Linear and own.keys() <= {"weight", "bias"} and all(p.requires_grad for p in own.values())


class Task:
    """What an algorithm's `loss` hook may call."""

    bound = False

    def __init__(
        self, module: nn.Module, space: Space, criterion: str | Criterion = "cross_entropy", half: bool = False
    ) -> None:
        """`half`: forward passes in bfloat16 where that is safe (autocast); weights, losses and all else as in `space`."""
        if isinstance(criterion, str) and criterion not in CRITERIA:
            raise ConfigError(f"unknown criterion {criterion!r}; {did_you_mean(criterion, CRITERIA)}")
        self.space = space
        self.module = copy.deepcopy(module).to(space.device, space.dtype).train()
        self.still = copy.deepcopy(self.module).eval()
        self.fused = criterion == "cross_entropy"  # torch has the mean of it in one kernel
        self.criterion: Criterion = CRITERIA[criterion] if isinstance(criterion, str) else criterion
        self.half = half
        self.layers = (
            [] if half else dense_layers(self.module)
        )  # of a dense network, whose straight steps need no autograd
        self.walk = walk_of(self.layers, space) if self.fused else None  # and may be in C

    def rows(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters of many networks as views of w [C, P]."""
        parts = torch.split(w, self.space.sizes, 1)
        return {n: t.view(-1, *shape) for (n, shape), t in zip(self.space.shapes.items(), parts, strict=True)}

    def passed(self, forward: Callable[[Tensor], Any], x: Tensor) -> Output:
        """A forward pass in the task's memory format and precision."""
        if self.space.last_channels and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if not self.half:
            return cast(Output, forward(x))
        with torch.autocast(self.space.device.type, torch.bfloat16, cache_enabled=False):
            output = forward(x)
        return tuple(t.to(self.space.dtype) for t in output)

    def __call__(self, w: Tensor, batch: Batch, call: str = "") -> Output:
        """Output and features in training mode; `call` names another method that the network offers."""
        raise NotImplementedError

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        """The batch's mean loss, over real samples."""
        return self.judge(self(w, batch)[0], batch)

    def judge(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean loss of an output."""
        if self.fused and entropy.fits(output, batch.y):
            return entropy.cross_entropy(output, batch.y, batch.weight)
        if self.fused and batch.weight is None:
            return F.cross_entropy(output, batch.y)
        return self.mean(self.criterion(output, batch.y), batch)

    def mean(self, values: Tensor, batch: Batch) -> Tensor:
        """The mean of per-sample values [B] over the real samples."""
        return values.mean() if batch.weight is None else (values * batch.weight).sum() / batch.weight.sum()

    def frozen(self, w: Tensor, buffers: Tensor, batch: Batch) -> Output:
        """Output and features of another model, in evaluation mode and without gradients."""
        with torch.no_grad():
            state = self.space.split(w.detach()) | self.space.split_buffers(buffers)
            return self.passed(lambda x: functional_call(self.still, state, (x,)), batch.x)


class Bound(Task):
    """The module's parameters and buffers are views of one flat vector each. `compiled`: by torch.compile, for training."""

    bound = True

    def __init__(
        self,
        module: nn.Module,
        space: Space,
        criterion: str | Criterion = "cross_entropy",
        half: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(module, space, criterion, half)
        self.flat, self.flat_buffers = space.start.clone(), space.buffers.clone()
        owned = dict(self.module.named_parameters())
        self.parameters, self.views = [owned[n] for n in space.shapes], list(space.split(self.flat).values())
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        held = dict(self.module.named_buffers())
        for name, view in space.split_buffers(self.flat_buffers).items():
            held[name].data = view
        self.leaf = self.flat
        if compiled:
            self.module.compile()

    def load(self, w: Tensor, buffers: Tensor) -> Tensor:
        """Move the module to w; the returned leaf collects what a loss says about w itself."""
        if w is not self.flat:
            self.flat.copy_(w)
        if buffers.numel():
            self.flat_buffers.copy_(buffers)
        self.leaf = self.flat.detach().requires_grad_()
        return self.leaf

    def unload(self, buffers: Tensor) -> Tensor:
        """The statistics after the forward pass."""
        return self.flat_buffers.clone() if buffers.numel() else buffers

    def follow(self, slope: Sequence[Tensor | None], rate: float) -> Tensor:
        """Go down a slope, of w itself and of every parameter, in place; returns where the module is, until it is moved again."""
        own, *grads = slope
        pairs = [(view, g) for view, g in zip(self.views, grads, strict=True) if g is not None]
        torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs], alpha=-rate)
        return self.flat if own is None else self.flat.sub_(own, alpha=rate)

    def __call__(self, w: Tensor, batch: Batch, call: str = "") -> Output:
        more = {"call": call} if call else {}
        if w is self.leaf:
            return self.passed(lambda x: self.module(x, **more), batch.x)
        return self.passed(lambda x: functional_call(self.module, self.space.split(w), (x,), more), batch.x)


class Functional(Task):
    """The module called with parameters split from w and with buffers that live for one step."""

    def __init__(
        self, module: nn.Module, space: Space, criterion: str | Criterion = "cross_entropy", half: bool = False
    ) -> None:
        super().__init__(module, space, criterion, half)
        self.live: dict[str, Tensor] = {}

    def load(self, buffers: Tensor) -> None:
        """Contiguous clones: as views of a flat row, vmapped batch norm would update a copy and lose the statistics."""
        self.live = {n: t.clone() for n, t in self.space.split_buffers(buffers).items()}

    def unload(self, buffers: Tensor) -> Tensor:
        """The statistics after the forward pass, flat again."""
        return torch.cat([t.reshape(-1) for t in self.live.values()]) if self.live else buffers

    def __call__(self, w: Tensor, batch: Batch, call: str = "") -> Output:
        more = {"call": call} if call else {}
        return self.passed(lambda x: functional_call(self.module, self.space.split(w) | self.live, (x,), more), batch.x)
