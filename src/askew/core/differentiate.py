"""Gradients of an objective at a point of R^P: by autograd, for one network or for many rows at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..errors import ModelError
from .task import Bound, Functional, Task

Objective = Callable[[Tensor], Tensor]


class GradientResult(NamedTuple):
    """A gradient [P], the objective's value, and the buffers after the forward pass."""

    gradient: Tensor
    value: Tensor
    buffers: Tensor


def differentiate(task: Task, objective: Objective, theta: Tensor, buffers: Tensor) -> GradientResult:
    """The gradient of one network, in the way of its task."""
    if isinstance(task, Bound):
        leaf = task.load(theta, buffers)
        value = objective(leaf)
        require_gradient(value)
        own, *grads = torch.autograd.grad(value, (leaf, *task.parameters), allow_unused=True)
        pairs = zip(grads, task.parameters, strict=True)
        g = torch.cat([p.new_zeros(p.numel()) if g is None else task.space.flatten_parameter(g) for g, p in pairs])
        return GradientResult(g if own is None else g + own, value.detach(), task.unload(buffers))
    assert isinstance(task, Functional)
    g, (value, after) = grad_and_value(partial(value_and_buffers, task, objective, buffers), has_aux=True)(theta)
    return GradientResult(g, value, after)


def value_and_buffers(task: Functional, objective: Objective, buffers: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The objective at theta, and the buffers after the forward pass."""
    task.load(buffers)
    value = objective(theta)
    if theta.requires_grad:  # rows of differentiate_rows() do not: there the gradient is taken outside of vmap
        require_gradient(value)
    return value, task.unload(buffers)


def require_gradient(value: Tensor) -> None:
    """Refuse a loss that has no gradient: torch would say so in its own words, or train nothing in silence."""
    if not value.requires_grad:
        raise ModelError(
            "the loss has no gradient, so that nothing would be trained; let the network and the criterion compute it "
            "from the weights, whatever the batch, without torch.no_grad(), .detach() or .item()."
        )


def differentiate_rows(
    evaluate: Callable[..., tuple[Tensor, Tensor]], theta: Tensor, *rows: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [C, P], values [C] and buffers [C, Q] of many networks; `evaluate` gives one's value and buffers.

    No row touches another, so the gradient of their sum is each row's own: vmap need not handle gradients.
    """
    leaf = theta.detach().requires_grad_()
    values, buffers = vmap(evaluate)(leaf, *rows)
    require_gradient(values)
    (g,) = torch.autograd.grad(_Sum.apply(values), leaf)  # type: ignore[no-untyped-call]
    return g, values.detach(), buffers.detach()


class _Sum(torch.autograd.Function):
    """A sum of which only the gradient is needed: for torch's own sum, autograd would import sympy, for seconds."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        return values.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)
