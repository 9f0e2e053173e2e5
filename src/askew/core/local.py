"""The only local training code: one step, one look, one client's round.

The order of operations in a step: gradient of the loss and the algorithm's terms → clip its norm → weight decay →
momentum → step. So weight decay is not clipped and a penalty is. Momentum starts anew each round; the rate is constant
within one.

A `Schedule` says how moves are applied: to one client (`sequential`), to rows of a cohort in lockstep (`vmapped`), or to
fixed buffers by replaying a captured graph (`slots`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from ..errors import AlgorithmError
from .algebra import clipped
from .algorithm import Algorithm
from .dense import Rule, in_a_row
from .settings import off
from .task import SLOPES, Bound, Functional, Task
from .types import Batch, Client, Number, State

Objective = Callable[[Tensor], Tensor]
GradientResult = tuple[Tensor, Tensor, Tensor]  # gradient, value, and the buffers after the forward pass


class Progress(NamedTuple):
    """What changes while a client works."""

    w: Tensor
    carry: State
    total: Tensor  # sum of the batch losses


class Result(NamedTuple):
    """What a client's phase leaves: the upload, its new state, and for the engine its model, carry and mean loss."""

    up: State
    mine: State
    w: Tensor
    carry: State
    loss: Tensor


class Schedule(Protocol):
    """One client's batches in order, or a cohort's in lockstep, and how a move is applied to them.

    `all` applies move(me, *moving); `some` applies move(task, me, moving, batch, share) with a task of its own.
    """

    def steps(self) -> Iterable[Any]: ...
    def chunks(self, name: str, step: int | None) -> Iterable[tuple[Any, Any]]: ...
    def all(self, move: Callable[..., Any], me: Client, *moving: Any) -> Any: ...
    def some(self, move: Callable[..., Progress], me: Client, moving: Progress, batch: Any, share: Any) -> Progress: ...


def differentiate(task: Task, objective: Objective, w: Tensor, buffers: Tensor) -> GradientResult:
    """Gradient [P], value and the buffers after the forward pass; each engine's task in its own way."""
    if isinstance(task, Bound):
        leaf = task.load(w, buffers)
        value = objective(leaf)
        own, *grads = torch.autograd.grad(value, (leaf, *task.parameters), allow_unused=True)
        flat = [
            p.new_zeros(p.numel()) if g is None else task.space.row(g)
            for g, p in zip(grads, task.parameters, strict=True)
        ]
        g = torch.cat(flat)
        return (g if own is None else g + own), value.detach(), task.unload(buffers)
    assert isinstance(task, Functional)
    g, (value, after) = grad_and_value(partial(watched, task, objective, buffers), has_aux=True)(w)
    return g, value, after


def watched(task: Functional, objective: Objective, buffers: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The value at w and the buffers after the forward pass."""
    task.load(buffers)
    value = objective(w)
    return value, task.unload(buffers)


def slide(task: Bound, objective: Objective, w: Tensor, buffers: Tensor, rate: float) -> GradientResult:
    """w − rate·gradient in place, the value and the buffers after."""
    leaf = task.load(w, buffers)
    value = objective(leaf)
    slope = torch.autograd.grad(value, (leaf, *task.parameters), allow_unused=True)
    return task.follow(slope, rate), value.detach(), task.unload(buffers)


def slide_rows(
    task: Task,
    w: Tensor,
    batch: Batch,
    rate: float,
    rule: Rule | None = None,
    b: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """The same of many dense networks w [C, P], on batches [C, B, …]; returns the values [C]. The walk may have a rule, b and momentum v.

    Gradients of linear layers are products, and never formed: weights are as long as all else together, and read once less.
    """
    if task.walk and whole(batch):
        v = v if rule and rule.momentum else None
        return task.walk(w, w, -rate, batch.x, batch.y, spans(batch), rule, b, v, batch.places, batch.table)
    assert rule is None, "other steps than straight ones are for the walk alone"
    assert len(batch.cuts) <= 2, "several batches at once are for the walk alone"
    rows = task.rows(w)

    def slid(name: str, behind: Tensor, before: Tensor) -> None:
        rows[f"{name}.weight"].baddbmm_(behind.mT, before, alpha=-rate)
        if f"{name}.bias" in rows:
            rows[f"{name}.bias"].sub_(behind.sum(1), alpha=rate)

    return traced_rows(task, rows, batch, slid)


def slope_rows(task: Task, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Gradients [C, P] and values [C] of many dense networks w [C, P] on batches [C, B, …]."""
    g = torch.empty_like(w, memory_format=torch.contiguous_format)
    if task.walk and whole(batch):
        return g, task.walk(w.contiguous(), g, 1.0, batch.x, batch.y, spans(batch))
    into = task.rows(g)

    def kept(name: str, behind: Tensor, before: Tensor) -> None:
        into[f"{name}.weight"].baddbmm_(behind.mT, before, beta=0)
        if f"{name}.bias" in into:
            torch.sum(behind, 1, out=into[f"{name}.bias"])

    return g, traced_rows(task, task.rows(w), batch, kept)


def whole(batch: Batch) -> bool:
    """Are labels the numbers of classes? They may be probabilities as well."""
    return batch.y.dtype is torch.long and batch.y.dim() == 2


def spans(batch: Batch) -> Tensor:
    """Where the real samples of batches [C, B, …] begin and end, [C, 1, 2], padding coming last; of one network's in a row, [1, S, 2]."""
    if batch.cuts:
        return in_a_row(batch.cuts)
    count, size = batch.y.shape
    begin = torch.arange(0, count * size, size)
    return torch.stack((begin, begin + (size if batch.weight is None else batch.weight.sum(1).long())), 1)[
        :, None
    ].contiguous()


def traced_rows(
    task: Task, rows: dict[str, Tensor], batch: Batch, each: Callable[[str, Tensor, Tensor], None]
) -> Tensor:
    """Through the layers of many dense networks and back. `each` sees a linear layer's name, the slopes behind it and its input."""
    x, passed = batch.x, list[tuple[nn.Module, str, Tensor, Tensor]]()
    for name, layer in task.layers:
        before = x
        if isinstance(layer, nn.Linear):
            weight, bias = rows[f"{name}.weight"], rows.get(f"{name}.bias")
            x = torch.bmm(x, weight.mT)
            if bias is not None:  # baddbmm would begin with a copy of it for every sample, which takes longer
                x.add_(bias[:, None])
        else:
            x = x.flatten(2) if isinstance(layer, nn.Flatten) else layer(x)
        passed.append((layer, name, before, x))
    values, g = judged_rows(task, x, batch)
    first = next(k for k, (layer, *_) in enumerate(passed) if isinstance(layer, nn.Linear))
    for k in range(len(passed) - 1, first - 1, -1):
        layer, name, before, after = passed[k]
        if not isinstance(layer, nn.Linear):
            g = SLOPES[type(layer)](layer, g, before, after)
            continue
        behind, g = g, torch.bmm(g, rows[f"{name}.weight"]) if k > first else g
        each(name, behind, before)
    return values


def judged_rows(task: Task, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean losses [C] of outputs [C, B, …], and their slopes there."""
    if not task.fused or batch.y.is_floating_point():
        leaf = output.requires_grad_()
        each = task.criterion(leaf.flatten(0, 1), batch.y.flatten(0, 1)).view(output.shape[:2])
        values = each.mean(1) if batch.weight is None else (each * batch.weight).sum(1) / batch.weight.sum(1)
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]
    logs, at = torch.log_softmax(output, 2), batch.y[..., None]
    right = logs.gather(2, at)
    slope = logs.exp_().scatter_(2, at, right.expm1())
    if batch.weight is None:
        return right.mean((1, 2)).neg_(), slope.div_(output.shape[1])
    share = (batch.weight / batch.weight.sum(1, keepdim=True))[..., None]
    return (right * share).sum((1, 2)).neg_(), slope.mul_(share)


def alone(batch: Batch) -> Batch:
    """The batch of one network, as those of many are."""
    x = batch.x if batch.places is not None else batch.x[None]
    return batch._replace(x=x, y=batch.y[None], weight=None if batch.weight is None else batch.weight[None])


def differentiate_rows(valued: Callable[..., tuple[Tensor, Tensor]], w: Tensor, *rows: Any) -> GradientResult:
    """The same of many clients at once, `valued` giving one's value and buffers at w. No row touches another, so the
    gradient of their sum is each row's own: vmap need not know of gradients.
    """
    leaf = w.detach().requires_grad_()
    values, buffers = vmap(valued)(leaf, *rows)
    (g,) = torch.autograd.grad(_Sum.apply(values), leaf)  # type: ignore[no-untyped-call]
    return g, values.detach(), buffers.detach()


class _Sum(torch.autograd.Function):
    """A sum that is never needed, only its slope: of a vector, torch would first import sympy, for seconds."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        return values.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)


def common(alg: Algorithm, *hooks: str) -> bool:
    """Are these hooks everybody's?"""
    return all(getattr(type(alg), hook) is getattr(Algorithm, hook) for hook in hooks)


def numbered(me: Client) -> bool:
    """Are the numbers of a step plain ones, and not in tensors?"""
    return not any(isinstance(number, Tensor) for number in (me.lr, me.momentum, me.decay, me.clip))


def usual(alg: Algorithm, me: Client) -> bool:
    """Do steps follow from gradients by the common rule?"""
    return common(alg, "direction", "descend", "note") and numbered(me)


def affine(alg: Algorithm, me: Client) -> bool:
    """Do steps follow from gradients by the common rule, or one that is the same but for a pull and a vector?

    Each class says so for the hooks it defines itself.
    """
    owners = [next(c for c in type(alg).__mro__ if hook in vars(c)) for hook in ("direction", "descend")]
    return common(alg, "note") and numbered(me) and all(c is Algorithm or vars(c).get("affine", False) for c in owners)


def affine_rule(alg: Algorithm, me: Client) -> tuple[Rule | None, Tensor | None]:
    """The rule, and its vector, of a method whose steps are affine; what they are is asked of its hooks.

    Factors are asked for where all else is zero, so that nothing is lost by differences.
    """
    if common(alg, "direction", "descend"):
        return rule_of(me), None
    zero, one = torch.zeros_like(me.x), torch.ones_like(me.x)
    nothing: Callable[[State], State] = lambda state: {n: torch.zeros_like(v) for n, v in state.items()}
    still = me._replace(x=zero, server=nothing(me.server), mine=nothing(me.mine))
    gain, pull = alg.direction(zero, lambda u: one, still)[0], alg.direction(one, lambda u: zero, still)[0]
    _, more = alg.descend(
        one, zero, zero, still._replace(momentum=1.0, decay=0.0)
    )  # the momentum is then what is added to d
    b = alg.direction(zero, lambda u: zero, me).contiguous()
    return Rule(float(gain), float(pull), float(me.momentum), float(me.decay) + float(more[0]), float(me.clip)), b


def bare(me: Client) -> bool:
    """Are there no momentum, weight decay and clipping?"""
    return off(me.momentum) and off(me.decay) and not isinstance(me.clip, Tensor) and math.isinf(me.clip)


def rule_of(me: Client) -> Rule | None:
    """The common rule as the walk takes it."""
    return None if bare(me) else Rule(1.0, 0.0, float(me.momentum), float(me.decay), float(me.clip))


def straight(alg: Algorithm, me: Client) -> bool:
    """Is a step w − rate·gradient and nothing else?"""
    return usual(alg, me) and bare(me)


def slides(alg: Algorithm, task: Task, me: Client, labels: torch.dtype) -> bool:
    """Are steps taken in place, with a dense network whose gradients nobody asks for?"""
    walks = bool(task.walk) and labels is torch.long and usual(alg, me)
    return dense(alg, task) and (walks or straight(alg, me))


def dense(alg: Algorithm, task: Task) -> bool:
    """Is the loss the task's alone, and its network one of linear layers and simple functions? On CUDA, kernels are captured instead."""
    return bool(task.layers) and type(alg).loss is Algorithm.loss and task.space.device.type == "cpu"


def together(alg: Algorithm, task: Task, me: Client, labels: torch.dtype) -> bool:
    """May steps be taken many at a time?"""
    return bool(task.walk) and labels is torch.long and dense(alg, task) and affine(alg, me) and not alg.each


def step(
    alg: Algorithm,
    task: Task,
    me: Client,
    moving: Progress,
    batch: Batch,
    share: Number = 1.0,
    known: GradientResult | tuple[()] = (),
) -> Progress:
    """One local step on one batch; a straight one of a bound task in place, which spares an MLP a quarter of the time."""
    w, me = moving.w, me._replace(carry=moving.carry)
    objective: Objective = lambda u: alg.loss(task, u, batch, me)
    if isinstance(task, Bound) and (slides(alg, task, me, batch.y.dtype) or len(batch.cuts) > 2):
        v = (
            me.carry["momentum"] if w is task.flat else me.carry["momentum"].clone()
        )  # it may be somebody's before the first step
        task.load(w, me.carry["buffers"])
        rule, b = affine_rule(alg, me)
        (value,) = slide_rows(
            task, task.flat[None], alone(batch), float(me.lr), rule, None if b is None else b[None], v[None]
        )
        return Progress(task.flat, me.carry | {"momentum": v}, moving.total + value)
    if isinstance(task, Bound) and straight(alg, me):
        w, value, buffers = slide(task, objective, w, me.carry["buffers"], float(me.lr))
        return Progress(w, me.carry | {"buffers": buffers}, moving.total + value)
    if isinstance(task, Bound) and task.walk and dense(alg, task):
        (g,), (value,) = slope_rows(task, w[None], alone(batch))
        known = (g, value, me.carry["buffers"])
    g, value, buffers = known or differentiate(task, objective, w, me.carry["buffers"])
    grad = lambda u: g if u is w else differentiate(task, objective, u, me.carry["buffers"])[0]
    d = alg.direction(w, grad, me)
    new, v = alg.descend(w, clipped(d, me.clip), me.carry["momentum"], me)
    carry = me.carry | alg.note(w, g, d, me) | {"momentum": v, "buffers": buffers}
    if len(carry) != len(me.carry):
        raise AlgorithmError(
            f"{alg.called()}: note() may only renew names that carry() started; new: {sorted(set(carry) - set(me.carry))}."
        )
    return Progress(new, carry, moving.total + value)


def glance(
    name: str,
    task: Task,
    me: Client,
    moving: Progress,
    batch: Batch,
    share: Number = 1.0,
    known: GradientResult | tuple[()] = (),
) -> Progress:
    """Look at one chunk without moving: its share of the mean is added to the carry."""
    carry = moving.carry
    if name == "gradient":
        g, value, _ = known or differentiate(task, lambda u: task.loss(u, batch), moving.w, carry["buffers"])
        return moving._replace(
            carry=carry | {"gradient": carry["gradient"] + share * g, "loss": carry["loss"] + share * value}
        )
    value = task.judge(task.frozen(moving.w, carry["buffers"], batch)[0], batch)
    return moving._replace(carry=carry | {name: carry[name] + share * value})


def begin(alg: Algorithm, me: Client) -> Progress:
    """The start of a phase: momentum at zero, received buffers, empty looks, the algorithm's own entries."""
    zero = me.x.new_zeros(())
    looks = {*alg.before, *alg.each, *alg.after}
    blank: State = {"validation": zero} if "validation" in looks else {}
    if "gradient" in looks:
        blank |= {"gradient": torch.zeros_like(me.x), "loss": zero}
    momentum = zero if off(me.momentum) else torch.zeros_like(me.x)
    me = me.carrying({"momentum": momentum, "buffers": me.buffers, **blank})
    own = alg.carry(me)
    if clash := {"buffers", *blank} & own.keys():
        raise AlgorithmError(
            f"{alg.called()}: carry() must not use {sorted(clash)[0]!r}, which the local loop keeps; rename that entry."
        )
    me = me.carrying(own)
    return Progress(alg.begin(me), me.carry, zero)


def finish(alg: Algorithm, me: Client, moving: Progress) -> Result:
    """The end of a phase."""
    me = me._replace(carry=moving.carry)
    up, mine = alg.finish(moving.w, me)
    loss = moving.total / me.steps if alg.trains else moving.carry.get("loss", moving.total)
    return Result(up, mine, moving.w, moving.carry, loss)


def client_moves(alg: Algorithm, me: Client, course: Schedule) -> Generator[None, None, Result]:
    """One client, one phase: the local loop. It pauses after every move, so that an engine may keep several going at a time."""

    def look(names: tuple[str, ...], moving: Progress, at: int | None = None) -> Generator[None, None, Progress]:
        for name in names:
            for chunk, share in course.chunks(name, at):
                moving = course.some(partial(glance, name), me, moving, chunk, share)
                yield
        return moving

    moving: Progress = course.all(partial(begin, alg), me)
    moving = yield from look(alg.before, moving)
    if alg.trains:
        move = partial(step, alg)
        for k, batch in enumerate(course.steps()):
            moving = course.some(move, me, moving, batch, 1.0)
            yield
            if alg.each:
                moving = yield from look(alg.each, moving, k)
    moving = yield from look(alg.after, moving)
    result: Result = course.all(partial(finish, alg), me, moving)
    return result


def client_round(alg: Algorithm, me: Client, course: Schedule) -> Result:
    """The local loop without a pause."""
    moves = client_moves(alg, me, course)
    while True:
        try:
            next(moves)
        except StopIteration as end:
            result: Result = end.value
            return result
