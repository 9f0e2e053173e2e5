"""Task: the network and its criterion as functions of a flat theta.

`Bound` ties a module's parameters to one flat buffer, so that a plain forward pass is a function of theta at no cost:
the sequential engine's way. `Functional` calls the module with the parameters split from theta: what vmap needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, ModelError, did_you_mean
from .space import Space
from .types import Batch
from .words import in_words

Output = tuple[Tensor, ...]  # output and features, in this order
Criterion = Callable[[Tensor, Tensor], Tensor]  # (output, y) → loss of each sample [B]

CRITERIA: dict[str, Criterion] = {
    "cross_entropy": lambda output, y: F.cross_entropy(output, y, reduction="none"),
    # targets of shape [B] belong to outputs [B, 1]; a plain difference would be that of all pairs
    "squared_error": lambda output, y: (
        0.5 * (output - y.reshape(output.shape)).square().reshape(len(output), -1).sum(1)
    ),
}


def check_losses(losses: object, count: int) -> None:
    """Refuse what a user's criterion returned if it is not one loss for each of so many samples."""
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        raise ModelError(
            f"the criterion must return one loss for each sample, a tensor of shape [{count}] here, and returned "
            f'{in_words(losses)}; leave out its average, as by reduction="none", and sum over further dimensions.'
        )


class LossKernel(Protocol):
    """What may compute a mean cross-entropy faster than torch does; None: not this one."""

    def cross_entropy(self, output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor | None: ...


class WithFeatures(nn.Module):
    """A user's module whose forward gives an output alone; features are the input of its last layer with weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        owners = [n for n, m in module.named_modules() if n and next(m.parameters(recurse=False), None) is not None]
        self.last = owners[-1].partition(".parametrizations.")[0] if owners else ""

    def forward(self, x: Tensor) -> Output:
        inputs: list[Tensor] = []
        record = lambda layer, args, named: inputs.extend([*args, *named.values()][:1])
        # for one call, so that copies of the module hold no hook
        hook = self.module.get_submodule(self.last).register_forward_pre_hook(record, with_kwargs=True)
        try:
            output = self.module(x)
        finally:
            hook.remove()
        return output, (inputs[-1] if inputs else output).flatten(1)  # a layer that is not called has no input


class Task:
    """What a method's `loss` hook may call."""

    in_rows = False  # may the network be one of many that are vmapped?

    def __init__(
        self,
        module: nn.Module,
        space: Space,
        criterion: str | Criterion = "cross_entropy",
        bf16: bool = False,
        kernel: LossKernel | None = None,
    ) -> None:
        """`bf16`: forward passes in bfloat16 where that is safe (autocast); all else has the type of `space`."""
        if isinstance(criterion, str) and criterion not in CRITERIA:
            raise ConfigError(f"unknown criterion {criterion!r}; {did_you_mean(criterion, CRITERIA)}")
        self.space, self.bf16, self.kernel = space, bf16, kernel
        self.module = copy.deepcopy(module).to(space.device, space.dtype).train()
        self.eval_module = copy.deepcopy(self.module).eval()
        self.is_cross_entropy = criterion == "cross_entropy"  # torch has the mean of it in one kernel
        self.own_criterion = not isinstance(criterion, str)
        self.criterion: Criterion = CRITERIA[criterion] if isinstance(criterion, str) else criterion

    def run_forward(self, forward: Callable[[Tensor], Any], x: Tensor) -> Output:
        """A forward pass in the task's memory format and precision."""
        if self.space.channels_last and x.dim() == 4 and not self.in_rows:  # vmap has no other memory formats
            x = x.contiguous(memory_format=torch.channels_last)
        if not self.bf16:
            return cast(Output, forward(x))
        with torch.autocast(self.space.device.type, torch.bfloat16, cache_enabled=False):
            output = forward(x)
        return tuple(t.to(self.space.dtype) for t in output)

    def __call__(self, theta: Tensor, batch: Batch, call: str = "") -> Output:
        """Output and features in training mode; `call` names another method that the network offers."""
        raise NotImplementedError

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """The batch's mean loss, over real samples."""
        return self.mean_loss(self(theta, batch)[0], batch)

    def mean_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean loss of an output, over real samples."""
        if self.is_cross_entropy and self.kernel is not None:
            value = self.kernel.cross_entropy(output, batch.y, batch.weight)
            if value is not None:
                return value
        if self.is_cross_entropy and batch.weight is None:
            return F.cross_entropy(output, batch.y)
        return self.mean(self.losses(output, batch.y), batch)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample [B]."""
        losses = self.criterion(output, y)
        if self.own_criterion:
            check_losses(losses, len(output))
        return losses

    def mean(self, values: Tensor, batch: Batch) -> Tensor:
        """The mean of per-sample values [B] over the real samples."""
        return values.mean() if batch.weight is None else (values * batch.weight).sum() / batch.weight.sum()

    def frozen(self, theta: Tensor, buffers: Tensor, batch: Batch) -> Output:
        """Output and features of another model, in evaluation mode and without gradients."""
        with torch.no_grad():
            state = self.space.split(theta.detach()) | self.space.split_buffers(buffers)
            return self.run_forward(lambda x: functional_call(self.eval_module, state, (x,)), batch.x)


class Bound(Task):
    """The module's parameters and buffers are views of one flat vector each. `compiled`: by torch.compile."""

    def __init__(
        self,
        module: nn.Module,
        space: Space,
        criterion: str | Criterion = "cross_entropy",
        bf16: bool = False,
        kernel: LossKernel | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__(module, space, criterion, bf16, kernel)
        self.flat, self.flat_buffers = space.start.clone(), space.buffers.clone()
        owned = dict(self.module.named_parameters())
        self.parameters, self.views = [owned[n] for n in space.shapes], list(space.split(self.flat).values())
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        buffers = dict(self.module.named_buffers())
        for name, view in space.split_buffers(self.flat_buffers).items():
            buffers[name].data = view
        self.leaf = self.flat
        if compiled:
            self.module.compile()

    def load(self, theta: Tensor, buffers: Tensor) -> Tensor:
        """Move the module to theta; the returned leaf collects what a loss says about theta itself."""
        if theta is not self.flat:
            self.flat.copy_(theta)
        if buffers.numel():
            self.flat_buffers.copy_(buffers)
        self.leaf = self.flat.detach().requires_grad_()
        return self.leaf

    def unload(self, buffers: Tensor) -> Tensor:
        """The statistics after the forward pass."""
        return self.flat_buffers.clone() if buffers.numel() else buffers

    def __call__(self, theta: Tensor, batch: Batch, call: str = "") -> Output:
        more = {"call": call} if call else {}
        if theta is self.leaf:
            return self.run_forward(lambda x: self.module(x, **more), batch.x)
        return self.run_forward(lambda x: functional_call(self.module, self.space.split(theta), (x,), more), batch.x)


class Functional(Task):
    """The module called with parameters split from theta and with buffers that are kept for one step."""

    in_rows = True
    live: dict[str, Tensor] = {}  # replaced by every load, never changed

    def load(self, buffers: Tensor) -> None:
        """Contiguous clones: as views of a flat row, vmapped batch norm would update a copy and lose the statistics."""
        self.live = {n: t.clone() for n, t in self.space.split_buffers(buffers).items()}

    def unload(self, buffers: Tensor) -> Tensor:
        """The statistics after the forward pass, flat again."""
        return torch.cat([t.reshape(-1) for t in self.live.values()]) if self.live else buffers

    def __call__(self, theta: Tensor, batch: Batch, call: str = "") -> Output:
        more = {"call": call} if call else {}
        state = self.space.split(theta) | self.live
        return self.run_forward(lambda x: functional_call(self.module, state, (x,), more), batch.x)
