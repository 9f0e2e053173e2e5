"""Local steps by kernels, for the engines on a CPU: asked for by method and client, checked, then taken.

The first step of every method is computed both ways, by the kernel and by the plain step (core/local.py), and compared
in every coordinate; a difference refuses the kernel, with a warning that names the method or the network. Since a step
may depend on the round and the client, this is done again in the rounds 2, 4, 8, … after it, with whoever is first. The
first gradient of a network is compared too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate
from ..core.local import Progress
from ..core.space import Space
from ..core.task import Bound, Task
from ..core.types import Batch, Client, State
from .affine import declared_step, has_numbers, keeps_declaration, largest, owns_step, takes_plain_steps
from .cpu import compiler
from .cpu.dense import SOURCE
from .dense import DenseNetwork, dense_layers, is_bare

# Steps of a client for each client at work beside it: above, a call of C for each client is faster than a call for each
# step of all of them. Measured with 10 to 100 clients, softmax regression and an MLP; where only the first can be done
# in C, it is so earlier.
MANY_PLAIN_STEPS, MANY_STEPS = 1.3, 0.4
GATHERED = 2**20  # bytes of samples that are gathered at a time: with a network, half of a usual cache
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest change: how near a kernel's step must be

Take = Callable[[Client, Progress, Batch, Sequence[int]], Progress | None]  # None: the plain code takes these steps


class Comparison(NamedTuple):
    """What came of comparing a method's step with the plain one."""

    alg: Algorithm  # kept in memory: comparisons are found by its identity
    agreed: bool
    again: float  # the round of the next comparison


class StepKernels:
    """Which steps of a task's network can be taken by a kernel, and the kernels' names once they were used."""

    def __init__(self, task: Task, used: set[str]) -> None:
        self.task, self.used, self.dense = task, used, DenseNetwork.of(task)
        self.compared_gradients = False
        self.comparisons: dict[int, Comparison] = {}  # by the method's identity

    def client_steps(self, alg: Algorithm, client: Client, labels: torch.dtype) -> ClientSteps | None:
        """What takes the steps of one client; None: the plain code does."""
        if self.dense is None or not has_plain_loss(alg) or self.refuses(alg):
            return None
        if not isinstance(self.task, Bound) or not (owns_step(alg) and has_numbers(client)):
            return None
        if self.dense.in_c(labels):
            samples = 0 if alg.each else GATHERED // (self._inputs() * self.task.space.dtype.itemsize)
            return ClientSteps(self, alg, self._in_c(alg, self.dense, self.task), samples, "C (dense steps)")
        if takes_plain_steps(alg) and is_bare(client):
            return ClientSteps(self, alg, self._by_products(self.dense, self.task), 0, "torch (dense steps)")
        return None

    def gradient(self, alg: Algorithm, theta: Tensor, batch: Batch, buffers: Tensor) -> GradientResult | None:
        """One network's gradient of the plain loss, in C; None: autograd does it."""
        if self.dense is None or not self.dense.in_c(batch.y.dtype):
            return None
        if (found := self.row_gradients(alg, theta[None], one_row(batch))) is None:
            return None
        (g,), (value,) = found
        return GradientResult(g, value, buffers)

    def row_steps(self, alg: Algorithm, client: Client, labels: torch.dtype) -> RowSteps | None:
        """What takes one step of many clients in place; `client` is one of them. None: the plain code does."""
        if self.dense is None or not has_plain_loss(alg) or self.refuses(alg):
            return None
        in_c = self.dense.in_c(labels)
        if not (takes_plain_steps(alg) and has_numbers(client)) or not (in_c or is_bare(client)):
            return None
        return RowSteps(self, alg, self.dense, client, "C (dense steps)" if in_c else "torch (dense steps)")

    def row_gradients(self, alg: Algorithm, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Many networks' gradients [C, P] and losses [C] of the plain loss; None: autograd does it."""
        if not has_plain_loss(alg):
            return None
        if self.dense is not None and not self.compared_gradients:
            self._compare_gradients(self.dense, theta[0], first_row(batch))
        if self.dense is None:
            return None
        self.used.add("C (dense gradients)" if self.dense.in_c(batch.y.dtype) else "torch (dense gradients)")
        return self.dense.gradients(theta, batch)

    # the ways to take a client's steps ------------------------------------------------------------------------------

    def _inputs(self) -> int:
        assert self.dense is not None and self.dense.kernel is not None
        return self.dense.kernel.inputs

    def _in_c(self, alg: Algorithm, dense: DenseNetwork, task: Bound) -> Take:
        def take(client: Client, progress: Progress, batch: Batch, cuts: Sequence[int]) -> Progress | None:
            rule = declared_step(alg, client._replace(carry=progress.carry))
            if rule is None:
                return None
            v = progress.carry["momentum"]
            if progress.theta is not task.flat:  # the first step: the momentum may be somebody else's until then
                v = v.clone()
            task.load(progress.theta, progress.carry["buffers"])
            value = dense.affine_steps(task.flat, batch, cuts, rule, client, v)
            return Progress(task.flat, progress.carry | {"momentum": v}, progress.loss_sum + value)

        return take

    def _by_products(self, dense: DenseNetwork, task: Bound) -> Take:
        def take(client: Client, progress: Progress, batch: Batch, cuts: Sequence[int]) -> Progress:
            task.load(progress.theta, progress.carry["buffers"])
            (value,) = dense.plain_steps(task.flat[None], one_row(batch), client)
            return Progress(task.flat, progress.carry, progress.loss_sum + value)

        return take

    # checking -------------------------------------------------------------------------------------------------------

    def refuses(self, alg: Algorithm) -> bool:
        """Did a step of the method differ from the plain one?"""
        known = self.comparisons.get(id(alg))
        return known is not None and not known.agreed

    def must_compare(self, alg: Algorithm, client: Client) -> bool:
        """Is the method's next step to be compared with the plain one?"""
        known = self.comparisons.get(id(alg))
        return known is None or (known.agreed and float(client.round) >= known.again)

    def compare(
        self, alg: Algorithm, client: Client, carry: State, before: Tensor, plain: Progress, fast: Progress
    ) -> None:
        """Note whether a kernel's step agrees with the plain one; say so where it does not."""
        kept = keeps_declaration(alg, client._replace(carry=carry))
        agreed = kept and same_step(before, plain, fast)
        self.comparisons[id(alg)] = Comparison(alg, agreed, 2 * float(client.round))
        if not kept:
            warnings.warn(
                f"{alg.display_name()}: its affine_step() is not what direction() and descend() do, "
                "so its steps are taken one by one; correct affine_step(), or remove it.",
                stacklevel=2,
            )
        elif not agreed:
            self._refuse_network("steps")

    def _compare_gradients(self, dense: DenseNetwork, theta: Tensor, batch: Batch) -> None:
        """Compare the kernel's gradient of one network with torch's, once."""
        self.compared_gradients = True
        (fast,), _ = dense.gradients(theta[None], one_row(batch))
        plain = differentiate(self.task, lambda leaf: self.task.loss(leaf, batch), theta, self.task.space.buffers)
        finite = bool(torch.isfinite(plain.gradient).all())
        if finite and largest(plain.gradient - fast) > TOLERANCE[theta.dtype] * largest(plain.gradient):
            self._refuse_network("gradients")

    def _refuse_network(self, what: str) -> None:
        """Leave this network to torch from now on."""
        self.dense = None
        warnings.warn(f"The kernels' {what} of this network differ from torch's, so torch computes them.", stacklevel=3)


class ClientSteps:
    """Takes the local steps of one client."""

    def __init__(self, kernels: StepKernels, alg: Algorithm, take: Take, samples: int, name: str) -> None:
        self.kernels, self.alg, self._take, self.name = kernels, alg, take, name
        self.samples = samples  # to gather at a time, in whole batches; 0: one batch

    def take(self, client: Client, progress: Progress, batch: Batch, cuts: Sequence[int]) -> Progress:
        """Steps on the batches cuts[k]:cuts[k+1] of the samples, in turn; the first of a method is checked."""
        if self.kernels.must_compare(self.alg, client):
            self._check(client, progress, batch_slice(batch, cuts[0], cuts[1]))
        if not self.kernels.refuses(self.alg) and (new := self._take(client, progress, batch, cuts)):
            self.kernels.used.add(self.name)
            return new
        for a, b in pairwise(cuts):
            progress = local.step(self.alg, self.kernels.task, client, progress, batch_slice(batch, a, b))
        return progress

    def _check(self, client: Client, progress: Progress, batch: Batch) -> None:
        """Take the first step both ways and compare; both are discarded, so that the real step is the same as ever."""
        if declared_step(self.alg, client._replace(carry=progress.carry)) is None:
            return
        carry = progress.carry | {"momentum": progress.carry["momentum"].clone()}
        copy = Progress(progress.theta.clone(), carry, progress.loss_sum)
        with torch.random.fork_rng(devices=[]):  # of a hook that draws, the real step's are the same as ever
            plain = local.step(self.alg, self.kernels.task, client, copy, batch)
            fast = self._take(client, copy, batch, (0, len(batch.y)))
        assert fast is not None, "a step that is declared is taken"
        self.kernels.compare(self.alg, client, progress.carry, progress.theta, plain, fast)


class RowSteps:
    """Takes one step of many clients' networks in place, by the common rule."""

    def __init__(self, kernels: StepKernels, alg: Algorithm, dense: DenseNetwork, client: Client, name: str) -> None:
        self.kernels, self.alg, self.dense, self.client, self.name = kernels, alg, dense, client, name

    def take(self, theta: Tensor, batch: Batch, v: Tensor) -> Tensor | None:
        """Change theta [C, P] and the momentum v; returns the batches' mean losses [C]. None: refused, no change."""
        if self.kernels.must_compare(self.alg, self.client):
            self._check(theta[0], first_row(batch), v[0])
        if self.kernels.refuses(self.alg):
            return None
        self.kernels.used.add(self.name)
        return self.dense.plain_steps(theta, batch, self.client, v)

    def _check(self, theta: Tensor, batch: Batch, v: Tensor) -> None:
        """Take the first row's step both ways."""
        begun = local.begin(self.alg, self.client)
        progress = Progress(theta.clone(), begun.carry | {"momentum": v.clone()}, begun.loss_sum)
        plain = local.step(self.alg, self.kernels.task, self.client, progress, batch)
        new, momentum = theta.clone()[None], v.clone()[None]
        value = self.dense.plain_steps(new, one_row(batch), self.client, momentum)
        fast = Progress(new[0], progress.carry | {"momentum": momentum[0]}, value[0])
        self.kernels.compare(self.alg, self.client, progress.carry, theta, plain, fast)


def prefers_client_steps(alg: Algorithm, module: nn.Module, space: Space, width: float, steps: float) -> bool:
    """Are all steps of one client after another faster than every step of all clients at a time, for small networks?

    `width` clients are at work side by side, and take so many steps each.
    """
    many = width * (MANY_PLAIN_STEPS if takes_plain_steps(alg) else MANY_STEPS)
    if space.device.type != "cpu" or steps <= many:
        return False
    in_c = bool(dense_layers(module)) and compiler.library(SOURCE, space.dtype) is not None
    return in_c and owns_step(alg) and has_plain_loss(alg) and not alg.each


def has_plain_loss(alg: Algorithm) -> bool:
    """Is the task's own loss differentiated, and nothing else?"""
    return type(alg).loss is Algorithm.loss and "loss" not in vars(alg)


def one_row(batch: Batch) -> Batch:
    """The batch of one network, as those of many are."""
    return Batch(batch.x[None], batch.y[None], None if batch.weight is None else batch.weight[None])


def first_row(batch: Batch) -> Batch:
    """The batch of the first of many networks."""
    return Batch(batch.x[0], batch.y[0], None if batch.weight is None else batch.weight[0])


def batch_slice(batch: Batch, a: int, b: int) -> Batch:
    """Some samples of a batch."""
    return Batch(batch.x[a:b], batch.y[a:b], None if batch.weight is None else batch.weight[a:b])


def same_step(before: Tensor, plain: Progress, fast: Progress) -> bool:
    """Do two ways lead to the same theta and momentum, up to rounding? Steps that are not finite are not compared."""
    v, fast_v = plain.carry["momentum"], fast.carry["momentum"]
    if not bool(torch.isfinite(plain.theta).all()) or not bool(torch.isfinite(v).all()):
        return True
    within, rounding = TOLERANCE[before.dtype], 8 * torch.finfo(before.dtype).eps
    allowed = within * largest(plain.theta - before) + rounding * largest(before)
    return largest(plain.theta - fast.theta) <= allowed and largest(v - fast_v) <= within * largest(v)
