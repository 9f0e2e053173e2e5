"""A trial of a network on a few inputs, before a run: what does not fit the data is refused by a sentence.

Of a user's own network it is also found out what no list of layers says: whether it draws random numbers, and whether
what it makes of a sample depends on the others of its batch. Engines that pad batches must know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.parameter import is_lazy

from ..core.differentiate import differentiate, differentiate_rows, value_and_buffers
from ..core.hooks import in_words
from ..core.settings import is_askews
from ..core.space import WRAPPED, Space
from ..core.task import Bound, Functional, WithFeatures
from ..core.types import Batch
from ..data.federation import Federation
from ..engine.choose import DRAWS, FORBIDS_PADDING
from ..errors import EngineError, ModelError

TRIED = 3  # samples in the trial of a training step
LONGEST = 64  # samples that they are padded to, or to the batch if that is shorter
LARGE = 10**6  # parameters; above, they are padded by one sample alone, so that the trial stays short
CLOSE = 1e-9  # of the largest number, in float64: by more than this, padding has changed a result


def check_module(module: nn.Module, fed: Federation, calls: list[str], batch: int = 0) -> nn.Module:
    """A copy of the network, after a trial: it takes the data's inputs and offers what the method calls."""
    name = type(module).__name__
    require_sizes(module)
    check_buffers(module)
    example = fed.inputs(fed.test.x[:2]).cpu()
    try:
        module = copy.deepcopy(module)  # a user's module stays as it is
        if example.is_floating_point():
            example = example.to(next(module.parameters(), example).dtype)
        with torch.no_grad():
            output = copy.deepcopy(module).eval()(example)
    except Exception as e:
        tokens = "" if example.is_floating_point() else ", whole numbers, which are taken for tokens"
        advice = " (numbers that are no tokens: pass x.astype(float))" if tokens else ""
        raise ModelError(
            f"the network cannot take inputs of shape {fed.shape}{tokens}: {first_line(e)}; "
            f"change the network or the data{advice}."
        ) from None
    check_output(output, example, fed, name)
    module = WithFeatures(module) if isinstance(output, Tensor) else module
    for call in calls:
        if not callable(getattr(module, call, None)):
            raise ModelError(
                f"this algorithm needs a network that offers {call}(x), which {type(module).__name__} does not; "
                "use mlp, cnn or resnet18 (of the data, it may need labels, public or validation)."
            )
        with torch.no_grad():
            copy.deepcopy(module).eval()(example, call=call)
    if not is_askews(type(module), "askew.models"):
        samples = fed.inputs(fed.test.x[:TRIED]).cpu()
        draws = check_training(module, samples.to(example.dtype), name)
        setattr(module, DRAWS, draws)
        is_large = sum(p.numel() for p in module.parameters()) > LARGE
        length = len(samples) + 1 if is_large else min(batch or LONGEST, LONGEST)
        setattr(module, FORBIDS_PADDING, not draws and padding_matters(module, samples, length))
    return module


def require_sizes(module: nn.Module) -> None:
    """Refuse a network with lazy layers, whose weights do not exist yet."""
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ModelError(
            f"the network {type(module).__name__} has a lazy layer, {lazy[0].rpartition('.')[0] or lazy[0]!r}, whose "
            "weights do not exist before its first input; call the network once, as in network(x[:2]), before you "
            "hand it over, or give the layer its size."
        )


def check_buffers(module: nn.Module) -> None:
    """Refuse buffers that cannot be averaged over clients, and gradients that are no plain tensors."""
    for name, buffer in module.named_buffers():
        if buffer.is_complex():
            raise ModelError(
                f"the buffer {name!r} of the network holds complex numbers, which are not sent; "
                "keep its real and its imaginary part, as by torch.view_as_real."
            )
        if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
            raise ModelError(
                f"the buffer {name!r} of the network holds numbers that are not finite, so that no answer of a client "
                "would be used; make it in forward, or as a mask of True and False."
            )
    if sparse := [n for n, m in module.named_modules() if isinstance(m, nn.Embedding) and m.sparse]:
        raise ModelError(f"the embedding {sparse[0]!r} of the network has sparse gradients; leave out sparse=True.")


def check_training(module: nn.Module, x: Tensor, name: str) -> bool:
    """Does a forward pass in training draw random numbers? What it changes that clients would share is refused."""
    probe, version = copy.deepcopy(module).train(), x._version
    before = {n: (buffer, buffer.clone()) for n, buffer in probe.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.get_rng_state()
        probe(x)
        draws = not torch.equal(state, torch.get_rng_state())
    if x._version != version:
        raise ModelError(
            f"the network {name} changes its input in place, and so the samples themselves; let it compute a new "
            "tensor, such as x = x - 0.5 instead of x -= 0.5, and leave out inplace=True where that comes first."
        )
    for n, buffer in probe.named_buffers():
        own = n.removeprefix(WRAPPED)
        old, values = before.get(n, (None, buffer))
        if old is not buffer:
            raise ModelError(
                f"the network {name} assigns its buffer {own!r} anew in forward, and a client's would stay with the "
                f"next one; change it in place, as by self.{own}.copy_(…)."
            )
        counts = not buffer.is_floating_point() and not own.endswith("num_batches_tracked")
        if counts and not torch.equal(buffer, values):
            raise ModelError(
                f"the network {name} changes its buffer {own!r} in forward, which holds whole numbers and is not sent; "
                "make it a buffer of floats."
            )
    return draws


def padding_matters(module: nn.Module, x: Tensor, length: int) -> bool:
    """Do gradients, outputs or statistics of samples change if further ones, which no loss counts, pad their batch?

    True too where this cannot be tried: batches are then never padded.
    """
    try:
        alone, padded = (training_step(module, batch, len(x)) for batch in (x, with_copies(x, length - len(x))))
    except Exception:
        return True
    return any(
        float((one - other).abs().max()) > CLOSE * (1 + float(one.abs().max()))
        for one, other in zip(alone, padded, strict=True)
        if one.numel()
    )


def with_copies(x: Tensor, count: int) -> Tensor:
    """Samples, and so many copies of the first one, at least one."""
    return torch.cat([x, x[:1].expand(max(count, 1), *x.shape[1:])])


def training_step(module: nn.Module, x: Tensor, count: int) -> list[Tensor]:
    """Outputs and features of the first samples, the gradient of a function of these, and buffers, in float64."""
    space, first = Space(module, torch.float64), list[Tensor]()
    task, batch = Bound(module, space), Batch(x.double() if x.is_floating_point() else x, x[:0])

    def value(theta: Tensor) -> Tensor:
        first.extend(t[:count] for t in task(theta, batch))
        weights = [torch.arange(t.numel(), dtype=t.dtype).cos().view(t.shape) for t in first]  # all different
        return torch.stack([(t * weight).sum() for t, weight in zip(first, weights, strict=True)]).sum()

    gradient, _, buffers = differentiate(task, value, space.start, space.buffers)
    return [*(t.detach() for t in first), gradient, buffers]


def check_rows(engine: str, task: Functional, fed: Federation) -> None:
    """Refuse a user's network that torch cannot differentiate for many clients at once, in this engine's way."""
    if is_askews(type(task.module), "askew.models"):
        return
    batch = Batch(fed.inputs(fed.test.x[[0, 0]]), fed.test.y[[0, 0]])
    rows, buffers = task.space.start.expand(2, -1).clone(), task.space.buffers
    loss = partial(task.loss, batch=batch)
    try:
        if engine == "stacked":
            differentiate_rows(partial(value_and_buffers, task, loss, buffers), rows)
        else:
            vmap(lambda theta: tuple(differentiate(task, loss, theta, buffers)))(rows)
    except Exception as e:
        raise EngineError(
            f'engine: "{engine}" trains many clients at once, which torch cannot do with this network '
            f'({first_line(e)}); use engine.name = "sequential" or "slots".'
        ) from None


def check_output(output: object, example: Tensor, fed: Federation, name: str) -> None:
    """Refuse an output that is no tensor of one row for each input, or that does not fit the targets."""
    logits = output[0] if isinstance(output, tuple) and len(output) > 1 else output
    if not isinstance(logits, Tensor) or (isinstance(output, tuple) and not isinstance(output[1], Tensor)):
        raise ModelError(
            f"the network {name} must return its output, a tensor, or the pair (output, features), and returned "
            f"{what_came(output)}; change its forward, or wrap it in a module whose forward returns the tensor."
        )
    if logits.dim() == 0 or len(logits) != len(example):
        raise ModelError(
            f"the network {name} must return one row for each input, and returned {in_words(logits)} for "
            f"{len(example)} inputs; keep the first dimension for the batch."
        )
    if fed.criterion == "cross_entropy":
        outputs = logits.shape[1] if logits.dim() > 1 else 0
        if outputs < fed.classes:
            raise ModelError(
                f"the network {name} has {outputs or 'no row of'} outputs, and the data have {fed.classes} classes; "
                f"give its last layer {fed.classes} outputs."
            )
    elif fed.has_targets:
        check_targets(logits, fed, name)


def check_targets(output: Tensor, fed: Federation, name: str) -> None:
    """Refuse an output of another shape than the targets', and a criterion that gives no loss for each sample."""
    y = fed.test.y[: len(output)].cpu()
    if fed.criterion == "squared_error":
        if output.numel() != y.numel():
            raise ModelError(
                f"the network {name} returns {list(output.shape[1:])} numbers for an input, and a target has shape "
                f"{list(y.shape[1:])}; both must hold as many numbers: change the network or the targets."
            )
        return
    assert callable(fed.criterion)
    try:
        losses = fed.criterion(output, y.to(output.dtype) if y.is_floating_point() else y)
    except Exception as e:
        raise ModelError(
            f"the criterion failed on the output of {name}, {in_words(output)}, and targets, {in_words(y)}: "
            f"{first_line(e)}; correct the criterion or the network."
        ) from None
    if not isinstance(losses, Tensor) or losses.shape != (len(output),):
        raise ModelError(
            f"the criterion must return one loss for each sample, a tensor of shape [{len(output)}] here, and returned "
            f'{in_words(losses)}; leave out its average, as by reduction="none", and sum over further dimensions.'
        )


def what_came(output: object) -> str:
    """What a network returned, in words."""
    if isinstance(output, Mapping):
        keys = ", ".join(map(repr, output))
        return f"a {type(output).__name__} with {keys}" if keys else f"an empty {type(output).__name__}"
    return in_words(output)


def first_line(e: Exception) -> str:
    """The first line of an exception's text, or its name."""
    return next(iter(str(e).splitlines()), "") or type(e).__name__
