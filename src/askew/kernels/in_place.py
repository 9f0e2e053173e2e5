"""Plain SGD steps of a bound module: each parameter moves along its own gradient, which is never copied together."""

from __future__ import annotations

import torch

from ..core import hooks
from ..core.algorithm import Algorithm
from ..core.local import Progress
from ..core.task import Bound
from ..core.types import Batch, Client


def in_place_step(alg: Algorithm, task: Bound, client: Client, progress: Progress, batch: Batch) -> Progress:
    """theta − lr·gradient, written into the module's own parameters."""
    client = client._replace(carry=progress.carry)
    leaf = task.load(progress.theta, client.carry["buffers"])
    value = hooks.loss(alg, task, leaf, batch, client)
    own, *grads = torch.autograd.grad(value, (leaf, *task.parameters), allow_unused=True)
    pairs = [(view, g) for view, g in zip(task.views, grads, strict=True) if g is not None]
    rate = float(client.lr)
    torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs], alpha=-rate)
    if own is not None:
        task.flat.sub_(own, alpha=rate)
    carry = client.carry | {"buffers": task.unload(client.carry["buffers"])}
    return Progress(task.flat, carry, progress.loss_sum + value.detach())
