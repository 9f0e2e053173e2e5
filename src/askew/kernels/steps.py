"""Local steps in C, for the engines on a CPU: asked for by method and client, checked, then taken.

The first step of every method is computed both ways, in C and by the plain step (core/local.py), and compared in every
coordinate; a difference refuses the kernel, with a warning that names the method or the network. Since a step may
depend on the round and the client, this is done again in the rounds 2, 4, 8, … after it, with whoever is first. The
first gradient of a network is compared too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate
from ..core.local import Progress
from ..core.settings import is_askews
from ..core.space import Space
from ..core.task import Bound, Task
from ..core.types import Affine, Batch, Client
from .affine import declared_step, has_numbers, keeps_declaration, largest, owns_step, takes_plain_steps
from .cpu.dense import DenseKernel, row_spans
from .dense import dense_kernel

# Steps of a client for each client at work beside it: above, a call of C for each client is faster than a call for each
# step of all of them. Measured with 10 to 100 clients, softmax regression and an MLP; where only the first can be done
# in C, it is so earlier.
MANY_PLAIN_STEPS, MANY_STEPS = 1.3, 0.4
GATHERED = 2**20  # bytes of samples that are gathered at a time: with a network, half of a usual cache
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest change: how near a kernel's step must be


class Comparison(NamedTuple):
    """What came of comparing a method's step with the plain one."""

    alg: Algorithm  # kept in memory: comparisons are found by its identity
    agreed: bool
    again: float  # the round of the next comparison


class StepKernels:
    """Which steps and gradients of a task's network are computed in C, and the kernels' names once they were used."""

    def __init__(self, task: Task, used: set[str]) -> None:
        self.task, self.used = task, used
        suited = task.is_cross_entropy and not task.bf16
        self.dense = dense_kernel(task.module, task.space) if suited else None
        self.compared_gradients = False
        self.comparisons: dict[int, Comparison] = {}  # by the method's identity

    def client_steps(self, alg: Algorithm, client: Client, labels: torch.dtype) -> ClientSteps | None:
        """What takes the steps of one client; None: the plain code does."""
        dense = self._kernel(alg, labels)
        if dense is None or self.refuses(alg) or not isinstance(self.task, Bound):
            return None
        return ClientSteps(self, alg, dense, self.task) if owns_step(alg) and has_numbers(client) else None

    def row_steps(self, alg: Algorithm, client: Client, labels: torch.dtype) -> RowSteps | None:
        """What takes one step of many clients in place; `client` is one of them. None: the plain code does."""
        dense = self._kernel(alg, labels)
        if dense is None or self.refuses(alg):
            return None
        return RowSteps(self, alg, dense, client) if takes_plain_steps(alg) and has_numbers(client) else None

    def gradient(self, alg: Algorithm, theta: Tensor, batch: Batch, buffers: Tensor) -> GradientResult | None:
        """One network's gradient of the plain loss; None: autograd computes it."""
        if self.dense is None or (found := self.row_gradients(alg, theta[None], one_row(batch))) is None:
            return None
        (g,), (value,) = found
        return GradientResult(g, value, buffers)

    def row_gradients(self, alg: Algorithm, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Many networks' gradients [C, P] and losses [C] of the plain loss; None: autograd computes them."""
        if (dense := self._kernel(alg, batch.y.dtype)) is None:
            return None
        if not self.compared_gradients and not self._gradients_agree(dense, theta[0], first_row(batch)):
            return None
        self.used.add("C (dense gradients)")
        return dense.gradients(theta, batch)

    def _kernel(self, alg: Algorithm, labels: torch.dtype) -> DenseKernel | None:
        """The kernel if it computes this method's loss; labels must be the numbers of classes, not probabilities."""
        return self.dense if labels is torch.long and has_plain_loss(alg) else None

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
        self, alg: Algorithm, client: Client, progress: Progress, batch: Batch, take: Callable[[Progress], Progress]
    ) -> None:
        """Take one step both ways and note whether they agree; say so where they do not. Both steps are discarded."""
        with torch.random.fork_rng(devices=[]):  # of a hook that draws, the real step's numbers are the same as ever
            plain = local.step(alg, self.task, client, copied(progress), batch)
            fast = take(copied(progress))
        kept = keeps_declaration(alg, client._replace(carry=progress.carry))
        agreed = kept and same_step(progress.theta, plain, fast)
        self.comparisons[id(alg)] = Comparison(alg, agreed, 2 * float(client.round))
        if not kept:
            warnings.warn(
                f"{alg.display_name()}: its affine_step() is not what direction() and descend() do, "
                "so its steps are taken one by one; correct affine_step(), or remove it.",
                stacklevel=2,
            )
        elif not agreed:
            self._refuse_network("steps")

    def _gradients_agree(self, dense: DenseKernel, theta: Tensor, batch: Batch) -> bool:
        """Compare the kernel's gradient of one network with torch's, once."""
        self.compared_gradients = True
        plain = differentiate(self.task, lambda leaf: self.task.loss(leaf, batch), theta, self.task.space.buffers)
        (fast,), _ = dense.gradients(theta[None], one_row(batch))
        finite = bool(torch.isfinite(plain.gradient).all())
        if finite and largest(plain.gradient - fast) > TOLERANCE[theta.dtype] * largest(plain.gradient):
            self._refuse_network("gradients")
        return self.dense is not None

    def _refuse_network(self, what: str) -> None:
        """Leave this network to torch from now on."""
        self.dense = None
        warnings.warn(f"The kernels' {what} of this network differ from torch's, so torch computes them.", stacklevel=3)


class ClientSteps:
    """Takes the local steps of one client."""

    def __init__(self, kernels: StepKernels, alg: Algorithm, dense: DenseKernel, task: Bound) -> None:
        self.kernels, self.alg, self.dense, self.task = kernels, alg, dense, task
        # to gather at a time, in whole batches; 0: one batch
        self.samples = 0 if alg.each else GATHERED // (dense.inputs * task.space.dtype.itemsize)

    def take(self, client: Client, progress: Progress, batch: Batch, cuts: Sequence[int]) -> Progress:
        """Steps on the batches cuts[k]:cuts[k+1] of the samples, in turn; the first of a method is checked."""
        kernels, rule = self.kernels, declared_step(self.alg, client._replace(carry=progress.carry))
        if rule is not None:
            if kernels.must_compare(self.alg, client):
                first = batch_slice(batch, cuts[0], cuts[1])
                kernels.compare(self.alg, client, progress, first, partial(self._in_c, rule, client, batch, cuts[:2]))
            if not kernels.refuses(self.alg):
                kernels.used.add("C (dense steps)")
                return self._in_c(rule, client, batch, cuts, progress)
        for a, b in pairwise(cuts):
            progress = local.step(self.alg, self.task, client, progress, batch_slice(batch, a, b))
        return progress

    def _in_c(self, rule: Affine, client: Client, batch: Batch, cuts: Sequence[int], progress: Progress) -> Progress:
        theta, v = self.task.flat, progress.carry["momentum"]
        if progress.theta is not theta:  # the first step: the momentum may be somebody else's until then
            v = v.clone()
        self.task.load(progress.theta, progress.carry["buffers"])
        spans = torch.tensor([list(pairwise(cuts))])
        (value,) = self.dense.steps(theta[None], batch, spans, rule, client, v[None])
        return Progress(theta, progress.carry | {"momentum": v}, progress.loss_sum + value)


class RowSteps:
    """Takes one step of many clients' networks in place, by the common rule."""

    def __init__(self, kernels: StepKernels, alg: Algorithm, dense: DenseKernel, client: Client) -> None:
        self.kernels, self.alg, self.dense, self.client = kernels, alg, dense, client

    def take(self, theta: Tensor, batch: Batch, v: Tensor) -> Tensor | None:
        """Change theta [C, P] and the momentum v; returns the batches' mean losses [C]. None: refused, no change."""
        if self.kernels.must_compare(self.alg, self.client):
            self._compare(theta[0], first_row(batch), v[0])
        if self.kernels.refuses(self.alg):
            return None
        self.kernels.used.add("C (dense steps)")
        return self._in_c(theta, batch, v)

    def _compare(self, theta: Tensor, batch: Batch, v: Tensor) -> None:
        """Compare the first row's step."""

        def in_c(at: Progress) -> Progress:
            (value,) = self._in_c(at.theta[None], one_row(batch), at.carry["momentum"][None])
            return at._replace(loss_sum=at.loss_sum + value)

        begun = local.begin(self.alg, self.client)
        progress = begun._replace(theta=theta, carry=begun.carry | {"momentum": v})
        self.kernels.compare(self.alg, self.client, progress, batch, in_c)

    def _in_c(self, theta: Tensor, batch: Batch, v: Tensor) -> Tensor:
        return self.dense.steps(theta, batch, row_spans(batch), Affine(), self.client, v)


def prefers_client_steps(alg: Algorithm, module: nn.Module, space: Space, width: float, steps: float) -> bool:
    """Are all steps of one client after another faster than every step of all clients at a time, for small networks?

    `width` clients are at work side by side, and take so many steps each.
    """
    many = width * (MANY_PLAIN_STEPS if takes_plain_steps(alg) else MANY_STEPS)
    if steps <= many or alg.each or not (owns_step(alg) and has_plain_loss(alg)):
        return False
    return dense_kernel(module, space) is not None


def has_plain_loss(alg: Algorithm) -> bool:
    """Is the task's own loss differentiated, and nothing else?"""
    loss = type(alg).loss
    return loss is Algorithm.loss and is_askews(loss) and "loss" not in vars(alg)


def one_row(batch: Batch) -> Batch:
    """The batch of one network, as those of many are."""
    return Batch(batch.x[None], batch.y[None], None if batch.weight is None else batch.weight[None])


def first_row(batch: Batch) -> Batch:
    """The batch of the first of many networks."""
    return Batch(batch.x[0], batch.y[0], None if batch.weight is None else batch.weight[0])


def batch_slice(batch: Batch, a: int, b: int) -> Batch:
    """Some samples of a batch."""
    return Batch(batch.x[a:b], batch.y[a:b], None if batch.weight is None else batch.weight[a:b])


def copied(progress: Progress) -> Progress:
    """The same with a theta and a momentum of its own, which may be changed in place."""
    carry = progress.carry | {"momentum": progress.carry["momentum"].clone()}
    return progress._replace(theta=progress.theta.clone(), carry=carry)


def same_step(before: Tensor, plain: Progress, fast: Progress) -> bool:
    """Do two ways lead to the same theta and momentum, up to rounding? Steps that are not finite are not compared."""
    v, fast_v = plain.carry["momentum"], fast.carry["momentum"]
    if not bool(torch.isfinite(plain.theta).all()) or not bool(torch.isfinite(v).all()):
        return True
    within, rounding = TOLERANCE[before.dtype], 8 * torch.finfo(before.dtype).eps
    allowed = within * largest(plain.theta - before) + rounding * largest(before)
    return largest(plain.theta - fast.theta) <= allowed and largest(v - fast_v) <= within * largest(v)
