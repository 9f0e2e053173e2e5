"""A trial of a network on a few inputs, before a run: what does not fit the data is refused by a sentence.

Of a user's own network it is also found out what no list of layers says: whether it draws random numbers, and whether
what it makes of a sample depends on the others of its batch. Engines that pad batches must know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.parameter import is_lazy

from ..core.differentiate import differentiate, differentiate_rows, value_and_buffers
from ..core.settings import is_askews
from ..core.space import WRAPPED, Space
from ..core.task import Bound, Functional, WithFeatures, check_losses
from ..core.text import count_text
from ..core.types import Batch
from ..core.words import in_words
from ..data.federation import Federation
from ..engine.choose import DRAWS, FORBIDS_PADDING
from ..errors import EngineError, ModelError
from .global_generators import generator_states, other_generators

TRIED = 3  # samples in the trial of a training step
LONGEST = 64  # samples that they are padded to, or to the batch if that is shorter
LARGE = 10**6  # parameters; above, they are padded by one sample alone, so that the trial stays short
CLOSE = 1e-9  # of the largest number, in float64: by more than this, padding has changed a result


def check_module(module: nn.Module, fed: Federation, calls: list[str], batch: int = 0) -> nn.Module:
    """A copy of the network, after a trial: it takes the data's inputs and offers what the method calls."""
    name = type(module).__name__
    require_sizes(module)
    check_values(module)
    example = fed.inputs(fed.test.x[:2]).cpu()
    try:
        module = copy.deepcopy(module)  # a user's module stays as it is
        if example.is_floating_point():
            example = example.to(next((p for p in module.parameters() if p.is_floating_point()), example).dtype)
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
    if not is_own(module):
        check_one_sample(module, example[:1], name)
        samples = fed.inputs(fed.test.x[:TRIED]).cpu()
        draws = check_training(module, samples.to(example.dtype), name)
        check_gradient(module, samples.to(example.dtype), name)
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


def is_own(module: nn.Module) -> bool:
    """Is this one of askew's networks, with no layer of a user's in it?"""
    layers = [type(layer) for layer in module.modules()]
    return is_askews(layers[0], "askew.models") and all(
        is_askews(layer) or layer.__module__.startswith("torch.") for layer in layers
    )


def check_values(module: nn.Module) -> None:
    """Refuse weights and buffers that cannot be sent or averaged, and what a copy of the network would not do."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ModelError(
                f"the parameter {name!r} of the network holds complex numbers, which are not trained; "
                "keep its real and its imaginary part, as by torch.view_as_real."
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"the parameter {name!r} of the network has a hook on its gradient, which a copy of the network does "
                "not have; change the weight in forward, as by self.weight * mask, or the gradient in direction() of "
                "a method of your own."
            )
    if wrapped := [n for n, m in module.named_modules() if "_orig_mod" in m._modules]:
        what = f"the layer {wrapped[0]!r}" if wrapped[0] else "the network"
        raise ModelError(
            f"{what} is wrapped by torch.compile, and copies of it, which clients train, would run old weights; "
            "pass the network without torch.compile, and set engine.compile = true to compile it on a CUDA device."
        )
    if replaced := [n or type(m).__name__ for n, m in module.named_modules() if "forward" in vars(m)]:
        raise ModelError(
            f"forward of {replaced[0]!r} was set on the object, and a copy of the network would run the old layers; "
            "write a class of your own that defines it."
        )
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


def check_one_sample(module: nn.Module, x: Tensor, name: str) -> None:
    """Refuse a network that loses the first dimension of a batch of one sample: last batches may be of one.

    What cannot take such a batch at all may be used where there is none.
    """
    try:
        with torch.random.fork_rng(devices=[]), other_generators(), torch.no_grad():
            output = copy.deepcopy(module).eval()(x)[0]
    except Exception:
        return
    if output.dim() == 0 or len(output) != 1:
        raise ModelError(
            f"the network {name} must return one row for each input, and returned {in_words(output)} for a batch of "
            "one; keep the first dimension for the batch, as by squeeze(-1) or flatten(1) instead of squeeze()."
        )


class Holdings(NamedTuple):
    """What a network holds beside its code, by name."""

    buffers: dict[str, tuple[Tensor, Tensor]]  # each with a copy
    weights: dict[str, tuple[int, int, Tensor]]  # where each is, how often it was changed, and a copy
    numbers: dict[str, float]

    @classmethod
    def of(cls, module: nn.Module) -> Holdings:
        """What this network holds now."""
        buffers = {n: (buffer, buffer.clone()) for n, buffer in module.named_buffers()}
        weights = {n: (p.data_ptr(), p._version, p.detach().clone()) for n, p in module.named_parameters()}
        return cls(buffers, weights, plain_numbers(module))

    def has_weight(self, name: str, p: Tensor) -> bool:
        """Is this weight as it was? By its numbers too: `.data` leaves no trace."""
        pointer, version, values = self.weights.get(name, (0, 0, p))
        return (pointer, version) == (p.data_ptr(), p._version) and same_numbers(values, p)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Do two tensors hold the same numbers? Those that are none are equal to each other."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def check_training(module: nn.Module, x: Tensor, name: str) -> bool:
    """Does a forward pass in training draw torch's random numbers? What it changes beside its output is refused."""
    probe, version, given = copy.deepcopy(module).train(), x._version, x.clone()
    before = Holdings.of(probe)
    with torch.random.fork_rng(devices=[]), other_generators(), torch.no_grad():
        state, others = torch.get_rng_state(), generator_states()
        once = probe(x)[0]
        draws = not torch.equal(state, torch.get_rng_state())
        draws_elsewhere = others != generator_states()
    if x._version != version or not same_numbers(x, given):
        raise ModelError(
            f"the network {name} changes its input in place, and so the samples themselves; let it compute a new "
            "tensor, such as x = x - 0.5 instead of x -= 0.5, and leave out inplace=True where that comes first."
        )
    check_holdings(probe, before, name)
    with torch.random.fork_rng(devices=[]), other_generators(), torch.no_grad():
        torch.set_rng_state(state)
        for buffer, values in before.buffers.values():
            buffer.copy_(values)
        again = probe(x)[0]
    if draws_elsewhere or not same_numbers(once, again):
        raise ModelError(
            f"the network {name} gives another output when it is run again: it draws random numbers that are not "
            "torch's own, or keeps something that is no buffer; draw by torch.rand and the like without a generator, "
            "and keep what changes in a buffer of floats, changed in place."
        )
    return draws


def check_holdings(probe: nn.Module, before: Holdings, name: str) -> None:
    """Refuse a network whose forward pass changed what engines cannot let each client change for itself."""
    for n, buffer in probe.named_buffers():
        own = n.removeprefix(WRAPPED)
        old, values = before.buffers.get(n, (None, buffer))
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
    if changed := [n for n, p in probe.named_parameters() if not before.has_weight(n, p)]:
        own = changed[0].removeprefix(WRAPPED)
        raise ModelError(
            f"the network {name} changes its weight {own!r} in forward, while engines keep all weights in one vector; "
            f"compute a new tensor from it and use that, as by torch.renorm(self.{own}, …), or by "
            "torch.nn.utils.parametrize."
        )
    if changed := [n for n, value in plain_numbers(probe).items() if before.numbers.get(n) != value]:
        own = changed[0].removeprefix(WRAPPED)
        raise ModelError(
            f"the network {name} changes its number {own!r} in forward, which is neither sent nor stored; "
            "make it a buffer of floats, as by register_buffer, and change it in place."
        )


def check_gradient(module: nn.Module, x: Tensor, name: str) -> None:
    """Refuse a network whose output has no gradient, on which some engines would train in silence."""
    with torch.random.fork_rng(devices=[]), other_generators():
        output = copy.deepcopy(module).train()(x)[0]
    if not output.requires_grad and any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            f"the output of the network {name} has no gradient, so that nothing would be trained; compute it from the "
            "weights, without torch.no_grad(), .detach() or .item()."
        )


def plain_numbers(module: nn.Module) -> dict[str, float]:
    """The numbers that layers hold as attributes, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, (int, float)) and value == value
    }


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
    """Refuse a user's network or criterion that torch cannot differentiate for many clients at once."""
    if is_own(task.module) and not callable(fed.criterion):
        return
    if has_backward_hooks(task.module):
        raise EngineError(
            f'engine: "{engine}" trains many clients at once, and this network has hooks on its backward pass, which '
            'would see all of them; use engine.name = "sequential" or "slots".'
        )
    x, y = (torch.stack([t[:TRIED], t[:TRIED].flip(0)]) for t in (fed.inputs(fed.test.x[:TRIED]), fed.test.y[:TRIED]))
    rows = [t.expand(2, -1).clone() for t in (task.space.start, task.space.buffers)] + [x, y]

    def for_all(theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return value_and_buffers(task, partial(task.loss, batch=Batch(x, y)), buffers, theta)

    def for_each(theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(differentiate(task, partial(task.loss, batch=Batch(x, y)), theta, buffers))

    try:
        if engine == "stacked":
            differentiate_rows(for_all, *rows)
        else:
            vmap(for_each)(*rows)
    except Exception as e:
        what = "criterion" if is_own(task.module) else "network or criterion" if callable(fed.criterion) else "network"
        raise EngineError(
            f'engine: "{engine}" trains many clients at once, which torch cannot do with this {what} '
            f'({first_line(e)}); use engine.name = "sequential" or "slots".'
        ) from None


def has_backward_hooks(module: nn.Module) -> bool:
    """Has a layer, or have all layers of this process, a hook on the backward pass?"""
    everywhere = torch.nn.modules.module
    return bool(everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks) or any(
        layer._backward_hooks or layer._backward_pre_hooks for layer in module.modules()
    )


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
            has = count_text(outputs, "output") if outputs else "no row of outputs"
            raise ModelError(
                f"the network {name} has {has}, and the data have {fed.classes} classes; "
                f"give its last layer {fed.classes} outputs."
            )
    elif fed.has_targets:
        check_targets(logits, fed, name)


def check_targets(output: Tensor, fed: Federation, name: str) -> None:
    """Refuse an output of another shape than the targets', and a criterion that gives no loss for each sample."""
    y = fed.test.y[: len(output)].cpu().clone()
    if fed.criterion == "squared_error":
        if output.numel() != y.numel():
            raise ModelError(
                f"the network {name} returns {list(output.shape[1:])} numbers for an input, and a target has shape "
                f"{list(y.shape[1:])}; both must hold as many numbers: change the network or the targets."
            )
        return
    assert callable(fed.criterion)
    try:
        output = output.detach().requires_grad_().clone()  # no leaf, which nothing may change in place
        y = y.to(output.dtype) if y.is_floating_point() else y
        given, version, losses = y.clone(), y._version, fed.criterion(output, y)
    except Exception as e:
        raise ModelError(
            f"the criterion failed on the output of {name}, {in_words(output)}, and targets, {in_words(y)}: "
            f"{first_line(e)}; correct the criterion or the network."
        ) from None
    if y._version != version or not same_numbers(y, given):
        raise ModelError(
            "the criterion changes the targets in place, and so the data themselves; let it compute a new tensor, "
            "such as y = y - 1 instead of y -= 1."
        )
    check_losses(losses, len(output))
    if not losses.requires_grad:
        raise ModelError(
            "the losses that the criterion returned have no gradient, so that nothing would be trained; compute them "
            "from the output, without torch.no_grad(), .detach() or .item()."
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
