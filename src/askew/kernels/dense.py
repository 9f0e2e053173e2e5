"""Networks of linear layers and elementwise functions: gradients and SGD steps without autograd, of many at once.

In C where that can be had, else as products of matrices. Rows: C networks theta [C, P], batches [C, B, …].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..core.settings import is_off
from ..core.task import Task, WithFeatures
from ..core.types import Affine, Batch, Client
from .cpu.dense import StepRule, dense_kernel

# (layer, gradient behind it, its input, its output) → the gradient before it
BACKWARD: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda layer, g, x, y: torch.ops.aten.threshold_backward(g, y, 0),
    nn.Tanh: lambda layer, g, x, y: torch.ops.aten.tanh_backward(g, y),
    nn.Sigmoid: lambda layer, g, x, y: torch.ops.aten.sigmoid_backward(g, y),
    nn.GELU: lambda layer, g, x, y: torch.ops.aten.gelu_backward(g, x, approximate=layer.approximate),
    nn.Identity: lambda layer, g, x, y: g,
}


class LayerRow(nn.Sequential):
    """Layers one after the other, a linear one last, whose forward pass gives (output, features)."""


def dense_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a network that flattens its input and goes on with linear layers and elementwise functions; else
    [].
    """
    wrapped = isinstance(module, WithFeatures) and type(module.module) is nn.Sequential
    row = module.module if isinstance(module, WithFeatures) and wrapped else module
    prefix = "module." if wrapped else ""
    layers = [(f"{prefix}{name}", layer) for name, layer in row._modules.items() if layer is not None]
    shared = len(dict(row.named_parameters())) < len(dict(row.named_parameters(remove_duplicate=False)))
    if shared or has_hooks(module) or not layers or not (wrapped or isinstance(row, LayerRow)):
        return []
    if not flattens(layers[0][1]):
        return []
    return layers if all(is_elementwise(layer) or is_linear(layer) for _, layer in layers[1:]) else []


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


def is_elementwise(layer: nn.Module) -> bool:
    """Is the layer's backward pass known, and its input left as it was?"""
    return type(layer) in BACKWARD and not getattr(layer, "inplace", False)


def is_linear(layer: nn.Module) -> bool:
    """Is it a linear layer whose weights are trained and have its sizes, with nothing put in their place?"""
    if type(layer) is not nn.Linear:
        return False
    shapes = {"weight": [layer.out_features, layer.in_features]}
    shapes |= {} if layer.bias is None else {"bias": [layer.out_features]}
    own = dict(layer.named_parameters())
    return {name: [*p.shape] for name, p in own.items()} == shapes and all(p.requires_grad for p in own.values())


class DenseNetwork:
    """The gradients and steps of the networks of a task."""

    def __init__(self, task: Task, layers: list[tuple[str, nn.Module]]) -> None:
        self.task, self.layers, self.space = task, layers, task.space
        self.kernel = dense_kernel(layers, task.space) if task.is_cross_entropy else None  # in C

    @classmethod
    def of(cls, task: Task) -> DenseNetwork | None:
        """The task's network if it is dense and on a CPU; on CUDA, kernels are captured instead."""
        layers = [] if task.bf16 or task.space.device.type != "cpu" else dense_layers(task.module)
        return cls(task, layers) if layers else None

    def in_c(self, labels: torch.dtype) -> bool:
        """Is C used? Labels must be the numbers of classes, not probabilities."""
        return self.kernel is not None and labels is torch.long

    def gradients(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients [C, P] and mean losses [C]."""
        if self.kernel is not None and has_class_labels(batch):
            return self.kernel.gradients(theta, batch.x, batch.y, row_spans(batch))
        g = torch.empty_like(theta, memory_format=torch.contiguous_format)
        into = self._parameters(g)

        def keep(name: str, behind: Tensor, before: Tensor) -> None:
            into[f"{name}.weight"].baddbmm_(behind.mT, before, beta=0)
            if f"{name}.bias" in into:
                torch.sum(behind, 1, out=into[f"{name}.bias"])

        return g, self._backward(theta, batch, keep)

    def plain_steps(self, theta: Tensor, batch: Batch, client: Client, momentum: Tensor | None = None) -> Tensor:
        """One step of every network by the common rule, in place; returns the mean losses [C].

        Without C only for steps along the gradient alone. Gradients of linear layers are products and never formed:
        weights are as long as all else together, and are so read once less.
        """
        lr = float(client.lr)
        if self.kernel is not None and has_class_labels(batch):
            rule = step_rule(Affine(), client)
            v = momentum if rule and rule.momentum else None
            return self.kernel.steps(theta, lr, rule, None, v, batch.x, batch.y, row_spans(batch))
        assert is_bare(client), "other steps than those along the gradient are for C alone"
        rows = self._parameters(theta)

        def descend(name: str, behind: Tensor, before: Tensor) -> None:
            rows[f"{name}.weight"].baddbmm_(behind.mT, before, alpha=-lr)
            if f"{name}.bias" in rows:
                rows[f"{name}.bias"].sub_(behind.sum(1), alpha=lr)

        return self._backward(theta, batch, descend)

    def affine_steps(
        self, theta: Tensor, batch: Batch, cuts: Sequence[int], rule: Affine, client: Client, momentum: Tensor
    ) -> Tensor:
        """Steps of ONE network theta [P] in place, on the batches cuts[k]:cuts[k+1] in turn; returns their loss sum."""
        assert self.kernel is not None
        how, shift = step_rule(rule, client), rule.shift
        if shift is None and (rule.gain, rule.pull) != (1.0, 0.0):  # gain and pull go with a shift
            shift = torch.zeros_like(theta)
        shift = None if shift is None else shift.to(theta.dtype).contiguous()[None]
        v = momentum[None] if how and how.momentum else None
        spans = torch.tensor([list(pairwise(cuts))])
        return self.kernel.steps(theta[None], float(client.lr), how, shift, v, batch.x, batch.y, spans)[0]

    # products of matrices -----------------------------------------------------------------------------------------

    def _parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters of many networks as views of theta [C, P]."""
        parts = torch.split(theta, self.space.sizes, 1)
        return {n: t.view(-1, *shape) for (n, shape), t in zip(self.space.shapes.items(), parts, strict=True)}

    def _backward(self, theta: Tensor, batch: Batch, use: Callable[[str, Tensor, Tensor], None]) -> Tensor:
        """Through the layers and back; `use` gets a linear layer's name, the gradients behind it and its input."""
        rows, x = self._parameters(theta), batch.x
        trace = list[tuple[str, nn.Module, Tensor, Tensor]]()
        for name, layer in self.layers:
            before = x
            if isinstance(layer, nn.Linear):
                x = torch.bmm(x, rows[f"{name}.weight"].mT)
                if (bias := rows.get(f"{name}.bias")) is not None:  # baddbmm would first copy it for every sample
                    x.add_(bias[:, None])
            else:
                x = x.flatten(2) if isinstance(layer, nn.Flatten) else layer(x)
            trace.append((name, layer, before, x))
        values, g = self._loss(x, batch)
        first = next(k for k, (_, layer, *_) in enumerate(trace) if isinstance(layer, nn.Linear))
        for k in range(len(trace) - 1, first - 1, -1):
            name, layer, before, after = trace[k]
            if isinstance(layer, nn.Linear):
                behind, g = g, torch.bmm(g, rows[f"{name}.weight"]) if k > first else g
                use(name, behind, before)
            else:
                g = BACKWARD[type(layer)](layer, g, before, after)
        return values

    def _loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean losses [C] of outputs [C, B, …], and their gradients there."""
        if not self.task.is_cross_entropy or batch.y.is_floating_point():
            leaf = output.requires_grad_()
            each = vmap(self.task.criterion)(leaf, batch.y)  # one that looks at its whole batch sees one client's
            weight = batch.weight
            values = each.mean(1) if weight is None else (each * weight).sum(1) / weight.sum(1)
            return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]
        logs, at = torch.log_softmax(output, 2), batch.y[..., None]
        right = logs.gather(2, at)
        slope = logs.exp_().scatter_(2, at, right.expm1())
        if batch.weight is None:
            return right.mean((1, 2)).neg_(), slope.div_(output.shape[1])
        share = (batch.weight / batch.weight.sum(1, keepdim=True))[..., None]
        return (right * share).sum((1, 2)).neg_(), slope.mul_(share)


def has_class_labels(batch: Batch) -> bool:
    """Are labels the numbers of classes? They may be probabilities as well."""
    return batch.y.dtype is torch.long and batch.y.dim() == 2


def row_spans(batch: Batch) -> Tensor:
    """Where the real samples of batches [C, B, …] begin and end, [C, 1, 2]; padding comes last."""
    count, size = batch.y.shape
    begin = torch.arange(0, count * size, size)
    length = size if batch.weight is None else batch.weight.sum(1).long()
    return torch.stack((begin, begin + length), 1)[:, None].contiguous()


def is_bare(client: Client) -> bool:
    """Are there no momentum, weight decay and clipping?"""
    unclipped = not isinstance(client.clip, Tensor) and math.isinf(client.clip)
    return is_off(client.momentum) and is_off(client.decay) and unclipped


def is_plain(rule: Affine) -> bool:
    """Is the direction the gradient, with nothing added to it?"""
    return rule.shift is None and (rule.gain, rule.pull, rule.decay) == (1.0, 0.0, 0.0)


def step_rule(rule: Affine, client: Client) -> StepRule | None:
    """The rule as C takes it; None: a step along the gradient alone."""
    if is_plain(rule) and is_bare(client):
        return None
    decay = float(client.decay) + float(rule.decay)
    return StepRule(float(rule.gain), float(rule.pull), float(client.momentum), decay, float(client.clip))
