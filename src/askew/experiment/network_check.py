"""A trial of a network on two inputs, before a run: what does not fit the data is refused by a sentence."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.hooks import in_words
from ..core.task import WithFeatures
from ..data.federation import Federation
from ..errors import ModelError


def check_module(module: nn.Module, fed: Federation, calls: list[str]) -> nn.Module:
    """A copy of the network, after a trial: it takes the data's inputs and offers what the method calls."""
    name = type(module).__name__
    require_sizes(module)
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
    return module


def require_sizes(module: nn.Module) -> None:
    """Refuse a network with lazy layers, whose weights do not exist yet."""
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ModelError(
            f"the network {type(module).__name__} has a lazy layer, {lazy[0].rpartition('.')[0] or lazy[0]!r}, whose "
            "weights do not exist before its first input; call the network once, as in network(x[:2]), before you "
            "hand it over, or give the layer its size."
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
