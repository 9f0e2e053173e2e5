"""LSTM layers of many vmapped networks, of which the last output is read: their gates are one product a time step.

The products with what does not depend on the step before are taken for all times at once: those of the first layer's
inputs before the loop over time, and those of the weights' gradients after it. On CUDA one kernel a step serves all
networks and layers, in float32; elsewhere, and in float64, torch takes one layer after the other.

Shapes: G networks, L layers, T times, B samples, H units. weights [G, 2 L - 1, 4 H, H] are, layer by layer, those of
the hidden state and those of the input, but for the first layer's; gates [G, L, T, B, 4, H]; hidden and cells
[G, L, T + 1, B, H] begin with zeros.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cuda import available
from .cuda import lstm as cuda_lstm
from .cuda.rows import rows_first

TENSORS = 4  # of a layer: weights of input and hidden state, biases of both
ON_ARM = platform.machine() in ("aarch64", "arm64")
LEAST_WORK_ON_ARM = 2**16  # samples times units squared: below, a time step is mostly overhead
WORDS = 1024  # of an embedding at most that is a product


def run_layer(x: Tensor, layer: nn.LSTM | nn.Embedding, used: set[str]) -> Tensor | None:
    """The layer's output; None: torch does it, as in lower precision, or where it is compiled."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return None
    vmapped = torch._C._functorch.peek_interpreter_stack() is not None  # or another transform of torch.func
    if isinstance(layer, nn.Embedding):
        return embedding(x, layer) if vmapped and is_small_embedding(layer) else None
    if not supports(layer) or not (vmapped or is_slow_in_torch(x, layer)):
        return None
    used.add("Triton (LSTM layers)" if cuda_lstm.can_launch(x) else "torch (LSTM layers)")
    return last_output(x, layer)


def supports(layer: nn.Module) -> bool:
    """Is this an LSTM without extras, of which the last output is read?"""
    if not (isinstance(layer, nn.LSTM) and getattr(layer, "reads_last", False)):
        return False
    plain = not layer.bidirectional and not layer.proj_size and (not layer.dropout or layer.num_layers == 1)
    return plain and layer.batch_first and bool(layer.bias)


def is_slow_in_torch(x: Tensor, layer: nn.LSTM) -> bool:
    """Is this a training pass of one network on a CPU that takes longer in torch? Measured on ARM alone."""
    trained = x.device.type == "cpu" and torch.is_grad_enabled()
    return ON_ARM and trained and len(x) * layer.hidden_size**2 >= LEAST_WORK_ON_ARM


def runs_on_gpu(module: nn.Module, dtype: torch.dtype) -> bool:
    """Has the network LSTM layers, and do the kernels for CUDA take all of them?"""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    return bool(layers) and dtype is torch.float32 and available() and all(map(supports, layers))


def last_output(x: Tensor, layer: nn.LSTM) -> Tensor:
    """The last layer's output at the last time [B, H], of inputs [B, T, E]."""
    parameters = [getattr(layer, name) for name in layer._flat_weights_names]  # and not _flat_weights, which may be old
    y: Tensor = _LSTM.apply(x, *parameters)[0]  # type: ignore[no-untyped-call]
    return y


def is_small_embedding(layer: nn.Embedding) -> bool:
    """Is this an embedding without extras, of few words?"""
    if type(layer) is not nn.Embedding or layer.num_embeddings > WORDS:
        return False
    return layer.padding_idx is None and layer.max_norm is None and not (layer.scale_grad_by_freq or layer.sparse)


def embedding(x: Tensor, layer: nn.Embedding) -> Tensor:
    """The words' vectors as a product with zeros and ones, so that their gradient is a product too, without sorting."""
    words = torch.arange(layer.num_embeddings, device=x.device)
    chosen = (x.reshape(-1, 1) == words).to(layer.weight.dtype)
    return (chosen @ layer.weight).view(*x.shape, -1)


class Steps(NamedTuple):
    """What the backward pass needs of the forward pass."""

    weights: Tensor
    gates: Tensor
    cells: Tensor
    hidden: Tensor


def forward(x: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Steps]:
    """The last outputs [G, B, H], from inputs [G, B, T, E] and each layer's tensors."""
    groups, batch, times, _ = x.shape
    layers, units = len(parameters) // TENSORS, parameters[1].shape[2]
    launch = cuda_lstm.can_launch(x)
    size = -(-units // cuda_lstm.UNITS) * cuda_lstm.UNITS if launch else units
    inputs, recurrent = parameters[::TENSORS], parameters[1::TENSORS]
    matrices = [recurrent[0], *(w for pair in zip(recurrent[1:], inputs[1:], strict=True) for w in pair)]
    weights = torch.stack([pad_units(w, size, size) for w in matrices], 1)
    pairs = zip(parameters[2::TENSORS], parameters[3::TENSORS], strict=True)
    bias = torch.stack([pad_units((a + b)[..., None], size, 1)[..., 0] for a, b in pairs], 1)
    flat, first = times_first(x), pad_units(inputs[0], size, x.shape[3])
    pre = torch.baddbmm(bias[:, :1], flat, first.mT)
    hidden, cells = (x.new_empty((groups, layers, times + 1, batch, size)) for _ in range(2))
    hidden[:, :, 0].zero_()
    cells[:, :, 0].zero_()
    gates = x.new_empty((groups, layers, times, batch, 4, size))
    if launch:
        cuda_lstm.run_forward(pre, weights, bias, hidden, cells, gates)
    else:
        run_forward(pre, weights, bias, hidden, cells, gates)
    return hidden[:, -1, -1, :, :units].clone(), Steps(weights, gates, cells, hidden)


def backward(dy: Tensor, x: Tensor, first: Tensor, steps: Steps, deep: bool) -> tuple[Tensor, ...]:
    """Gradients of the inputs, if `deep`, and of each layer's tensors; `first` are the first layer's weights."""
    weights, gates, cells, hidden = steps
    (groups, layers, times, batch, _, size), units = gates.shape, dy.shape[2]
    dy = F.pad(dy, (0, size - units)).contiguous()
    slopes = (cuda_lstm.run_backward if cuda_lstm.can_launch(x) else run_backward)(dy, weights, cells, gates)
    flat = slopes.view(groups, layers, times * batch, 4 * size)
    sums = cut_units(flat.sum(2).view(groups * layers, -1, 1), units, 1).view(groups, layers, -1)
    gradients = list[Tensor]()
    for layer in range(layers):
        below = times_first(x) if layer == 0 else hidden[:, layer - 1, 1:].flatten(1, 2)
        before = hidden[:, layer, :-1].flatten(1, 2)
        back = flat[:, layer].mT
        wide = x.shape[3] if layer == 0 else units
        gradients += [cut_units(back @ below, units, wide), cut_units(back @ before, units, units)]
        gradients += [sums[:, layer], sums[:, layer]]
    if not deep:
        return x.new_empty((groups, 0)), *gradients
    dx = flat[:, 0] @ pad_units(first, size, x.shape[3])
    return dx.view(groups, times, batch, -1).transpose(1, 2), *gradients


def times_first(x: Tensor) -> Tensor:
    """Inputs [G, B, T, E] as [G, T·B, E]."""
    return x.transpose(1, 2).flatten(1, 2)


def pad_units(w: Tensor, size: int, wide: int) -> Tensor:
    """Weights [G, 4 H, K] as [G, 4 size, wide]; the units that are added have zeros, and so they stay zero."""
    units, inner = w.shape[1] // 4, w.shape[2]
    if (units, inner) == (size, wide):
        return w
    return F.pad(w.reshape(len(w), 4, units, inner), (0, wide - inner, 0, size - units)).flatten(1, 2)


def cut_units(w: Tensor, units: int, wide: int) -> Tensor:
    """The opposite of pad_units."""
    size = w.shape[1] // 4
    if (size, w.shape[2]) == (units, wide):
        return w
    return w.view(len(w), 4, size, -1)[:, :, :units, :wide].flatten(1, 2)


def run_forward(pre: Tensor, weights: Tensor, bias: Tensor, hidden: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Fill hidden, cells and gates, from the first layer's inputs `pre`."""
    for layer in range(gates.shape[1]):
        if layer:
            below = hidden[:, layer - 1, 1:].flatten(1, 2)
            pre = torch.baddbmm(bias[:, layer, None], below, weights[:, 2 * layer].mT)
        w, mine = weights[:, max(2 * layer - 1, 0)].mT, gates[:, layer]
        inputs, sums, both = pre.view(mine.flatten(3).shape).unbind(1), mine.flatten(3).unbind(1), mine[..., :2, :]
        i, f, g, o = (mine[..., k, :].unbind(1) for k in range(4))
        h, c = hidden[:, layer].unbind(1), cells[:, layer].unbind(1)
        for time, two in enumerate(both.unbind(1)):
            torch.baddbmm(inputs[time], h[time], w, out=sums[time])
            two.sigmoid_()
            torch.mul(f[time], c[time], out=c[time + 1]).addcmul_(i[time], g[time].tanh_())
            torch.mul(o[time].sigmoid_(), c[time + 1].tanh(), out=h[time + 1])


def run_backward(dy: Tensor, weights: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """What flows back to the gates, before their sigmoids and tanh, from that to the last layer's last output."""
    slopes, back = torch.empty_like(gates), None
    for layer in reversed(range(gates.shape[1])):
        if layer < gates.shape[1] - 1:
            above = slopes[:, layer + 1].flatten(3).flatten(1, 2) @ weights[:, 2 * layer + 2]
            back = above.view(cells[:, layer, 1:].shape).unbind(1)
        run_layer_backward(
            dy, back, weights[:, max(2 * layer - 1, 0)], cells[:, layer], gates[:, layer], slopes[:, layer]
        )
    return slopes


def run_layer_backward(
    dy: Tensor, back: tuple[Tensor, ...] | None, w: Tensor, cells: Tensor, gates: Tensor, slopes: Tensor
) -> None:
    """Fill a layer's slopes; `back`, at each time, is what the layer above sends, if there is one, else dy at last."""
    i, f, g, o = gates.unbind(3)
    tanh = cells[:, 1:].tanh()
    through = (o * (1 - tanh * tanh)).unbind(1)  # from the output to the cell, and from there to three gates
    inner = torch.stack((g * i * (1 - i), cells[:, :-1] * f * (1 - f), i * (1 - g * g)), 3).unbind(1)
    outer, forget, carried = (tanh * o * (1 - o)).unbind(1), f.unbind(1), torch.zeros_like(dy)
    sums, three, last = slopes.flatten(3).unbind(1), slopes[..., :3, :].unbind(1), slopes[..., 3, :].unbind(1)
    dh = dy if back is None else back[-1]
    for time in reversed(range(len(sums))):
        if time < len(sums) - 1:
            dh = sums[time + 1] @ w if back is None else torch.baddbmm(back[time], sums[time + 1], w)
        dc = torch.addcmul(carried, dh, through[time])
        torch.mul(dc[:, :, None], inner[time], out=three[time])
        torch.mul(dh, outer[time], out=last[time])
        carried = dc * forget[time]


class _ManyLSTMs(torch.autograd.Function):
    """Those of many networks at once."""

    @staticmethod
    def forward(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y, steps = forward(x, parameters)
        return y, *steps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, first, *steps), deep = ctx.saved_tensors, ctx.needs_input_grad[0]
        dx, *rest = backward(grads[0], x, first, Steps(*steps), deep)
        return dx if deep else None, *rest


class _LSTM(_ManyLSTMs):
    """That of one network, or of one of those that are vmapped."""

    @staticmethod
    def forward(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y, steps = forward(x[None], tuple(p[None] for p in parameters))
        return y[0], *(t[0] for t in steps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        deep = ctx.needs_input_grad[0]
        dx, *rest = _LSTMBackward.apply(deep, grads[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return dx if deep else None, *rest

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Tensor) -> Any:
        outputs = _ManyLSTMs.apply(*rows_first(info, dims, given))  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


class _LSTMBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that it too can be vmapped."""

    @staticmethod
    def forward(deep: bool, *given: Tensor) -> tuple[Tensor, ...]:
        dy, x, first, *steps = (t[None] for t in given)
        return tuple(t[0] for t in backward(dy, x, first, Steps(*steps), deep))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("LSTM layers in rows have no second derivative")

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], deep: bool, *given: Tensor) -> Any:
        dy, x, first, *steps = rows_first(info, dims[1:], given)
        outputs = backward(dy, x, first, Steps(*steps), deep)
        return outputs, (0,) * len(outputs)
