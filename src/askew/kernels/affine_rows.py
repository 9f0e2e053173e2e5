"""One local step of many clients in a few passes over their parameters, for methods whose step is affine.

The plain step (core/local.py) makes a new tensor for every term of a method, and the engine then copies the result.
Here what stays for the round is added up once, and the gradients become the step in place; on CUDA by a kernel of ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import hooks
from ..core.algebra import clip_factor
from ..core.algorithm import Algorithm
from ..core.settings import is_off
from ..core.types import Affine, Client, State
from .affine import keeps_declaration, owns_step
from .cuda import affine_rows as cuda_rows

USUAL = Affine()


class AffineRows:
    """Takes the steps of the rows of one method, which have the same momentum, weight decay and clipping."""

    def __init__(self, client: Client) -> None:
        self.momentum, self.decay, self.clip = client.momentum, client.decay, client.clip

    @classmethod
    def of(cls, alg: Algorithm, client: Client) -> AffineRows | None:
        """What takes the steps of this method; None where it declares none, or another one than its hooks take.

        `client` is one of the clients, with numbers, in the middle of its phase.
        """
        if not alg.trains or alg.each or not owns_step(alg):  # a look after each step may change what a rule reads
            return None
        return cls(client) if keeps_declaration(alg, client) else None

    @staticmethod
    def rule(alg: Algorithm, client: Client) -> State:
        """What a client's rule has beside the gradient, as tensors; the client may be one of many, under vmap."""
        rule = hooks.affine_step(alg, client)
        if rule is None:
            raise TypeError(f"{alg.display_name()}: affine_step() of a row gave None")
        numbers = {"gain": rule.gain, "pull": rule.pull, "decay": rule.decay}
        entries = {
            name: value if isinstance(value, Tensor) else client.w.new_full((), value)
            for name, value in numbers.items()
            if isinstance(value, Tensor) or value != getattr(USUAL, name)
        }
        return entries if rule.shift is None else entries | {"shift": rule.shift.to(client.w.dtype)}

    def take(self, theta: Tensor, v: Tensor, g: Tensor, rule: State, lr: Tensor, active: Tensor | None = None) -> None:
        """Change theta [C, P] and the momentum v of the rows that are active (None: all), and maybe the gradients g.

        The rule and lr have one row a client.
        """
        if cuda_rows.can_run(theta):
            cuda_rows.take(theta, v, g, rule, lr, active, self.momentum, self.decay, self.clip)
        elif active is None:
            self._take_all(theta, v, g, rule, lr)
        else:
            new_theta, new_v = theta.clone(), v.clone()
            self._take_all(new_theta, new_v, g, rule, lr)
            put_active(theta, new_theta, active)
            put_active(v, new_v, active)

    def _take_all(self, theta: Tensor, v: Tensor, g: Tensor, rule: State, lr: Tensor) -> None:
        """The same for all rows, by torch."""
        d = g
        if "gain" in rule:
            d.mul_(column(rule["gain"]))
        if "shift" in rule:
            d.add_(rule["shift"])
        if "pull" in rule:
            d.addcmul_(theta, column(rule["pull"]))
        scale = None if math.isinf(self.clip) else clip_factor(d, self.clip)
        decay = rule["decay"] + self.decay if "decay" in rule else self.decay
        if is_off(self.momentum):
            if not is_off(decay):
                theta.mul_(column(1 - lr * decay))
            theta.addcmul_(d, column(-lr if scale is None else -lr * scale))
            return
        v.mul_(self.momentum)
        if not is_off(decay):
            v.addcmul_(theta, column(decay)) if isinstance(decay, Tensor) else v.add_(theta, alpha=decay)
        v.add_(d) if scale is None else v.addcmul_(d, column(scale))
        theta.addcmul_(v, column(-lr))


def put_active(old: Tensor, new: Tensor, active: Tensor | None) -> None:
    """Put new rows in the place of old ones, those of rows that are active (None: all)."""
    if active is None:
        old.copy_(new)
    elif old.numel():
        torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old, out=old)


def column(numbers: Tensor) -> Tensor:
    """Numbers [C] as a factor of rows [C, P]."""
    return numbers.unsqueeze(1)
