"""A trial of a method's own loss, before a run: does it count samples that pad a batch?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..core import hooks, local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate
from ..core.space import Space
from ..core.task import Bound
from ..core.types import Batch, Client
from ..data.federation import Federation, LocalSettings
from .network_check import CLOSE, TRIED, with_copies


def loss_counts_padding(alg: Algorithm, module: nn.Module, fed: Federation, settings: LocalSettings) -> bool:
    """Does the loss of a user's own method change if further samples, of weight 0, pad its batch?

    As by F.cross_entropy(output, batch.y), which knows no weights. True too where this cannot be tried.
    """
    if all(hooks.is_ours(phase, "loss") for phase in alg.phases()):
        return False
    space = Space(module, torch.float64)
    task, batch = Bound(module, space, fed.criterion), first_samples(fed, space.dtype)
    weight = torch.tensor([1.0] * len(batch.y) + [0.0] * TRIED, dtype=space.dtype)
    padded = Batch(with_copies(batch.x, TRIED), with_copies(batch.y, TRIED), weight)
    theta = space.start + 0.1 * torch.randn(space.P, dtype=space.dtype, generator=torch.Generator().manual_seed(0))

    def result(phase: Algorithm, client: Client, batch: Batch) -> GradientResult:
        return differentiate(task, lambda leaf: phase.loss(task, leaf, batch, client), theta, space.buffers)

    try:
        for phase, client in first_steps(alg, space, fed, settings):
            (one, value, _), (other, padded_value, _) = (result(phase, client, b) for b in (batch, padded))
            far = max(float((one - other).abs().max()), float((value - padded_value).abs()))
            if far > CLOSE * (1 + float(one.abs().max()) + float(value.abs())):
                return True
    except Exception:  # whatever a user's hook raises: it is shown when the run calls it
        return True
    return False


def first_samples(fed: Federation, dtype: torch.dtype) -> Batch:
    """A few samples of the test set."""
    given = fed.inputs(fed.test.x[:TRIED]).cpu(), fed.test.y[:TRIED].cpu()
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in given)
    return Batch(x, y)


def first_steps(
    alg: Algorithm, space: Space, fed: Federation, settings: LocalSettings
) -> Iterator[tuple[Algorithm, Client]]:
    """What a client knows before its first step, phase by phase."""
    state, parts, declared = alg.client_state(space), alg.parts(space), alg.server_state(space) | alg.memory(space)
    carry = {"labels": fed.label_counts(fed.eligible[:1].tolist())[0].cpu()} if "labels" in alg.needs else {}
    rates = (settings.lr, settings.lr, settings.momentum, settings.weight_decay, settings.clip_limit)
    for phase in alg.phases():
        sent = {
            n: v.to(space.dtype) if v.is_floating_point() else v for n, v in declared.items() if n in phase.broadcast
        }
        client = Client(space.start, space.buffers, sent, state, carry, parts, *rates, 1.0, 1.0, 1.0, 1, 0.5)
        begun = local.begin(phase, client)
        yield phase, client._replace(carry=begun.carry)
        result = local.finish(phase, client, begun)
        state, carry = result.state, result.carry
