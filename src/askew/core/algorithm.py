"""Algorithm: what a method declares and the few pure functions in which it differs from FedAvg.

Everything else (loops, batching, devices, transport, storage) is written once, below this door. A model is a point
w in R^P, a cohort a matrix [C, P]. Client hooks are pure functions of one client's `Client`: no `if` on a tensor, no
`.item()`, nothing in place, so that the same hook runs in a plain loop, under vmap and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from .algebra import stepped
from .settings import Settings, off, setting
from .space import Space
from .task import Task
from .types import Batch, Client, Cohort, Part, State

Gradient = Callable[[Tensor], Tensor]


class Algorithm(Settings):
    """Fields are hyper-parameters; float fields may be 0-d tensors, so no client hook branches on one."""

    paper: ClassVar[str] = ""  # authors, venue, year
    idea: ClassVar[str] = ""  # one line
    broadcast: ClassVar[
        tuple[str, ...]
    ] = ()  # names of server state (the same to all) or memory (to each its row) sent down
    before: ClassVar[tuple[str, ...]] = ()  # looks at fixed w: "gradient", "validation", at the start,
    each: ClassVar[tuple[str, ...]] = ()  # after every step,
    after: ClassVar[tuple[str, ...]] = ()  # at the end
    trains: ClassVar[bool] = True  # False: this phase only looks
    needs: ClassVar[
        tuple[str, ...]
    ] = ()  # "public", "batchnorm" or what else must be there; refused at load if missing
    pooled: ClassVar[bool] = False  # one client holds all data
    exact: ClassVar[bool] = (
        False  # claims the exact optimum under skewed data and partial participation; tests measure it
    )
    affine: ClassVar[bool] = (
        False  # direction is gain·gradient + pull·w + b, numbers and a vector that stay; descend may add to d only a multiple of w
    )

    weighting: str = setting(
        "weights of the clients in averages: by sample count, or all equal",
        default="samples",
        choices=("samples", "uniform"),
    )

    @property
    def by_samples(self) -> bool:
        """Do averages weigh clients by their sample counts?"""
        return self.weighting == "samples"

    def fit(self, lr: float) -> None:
        """Refuse, when the configuration loads, what cannot work with this learning rate; raise ConfigError."""

    # what it keeps ----------------------------------------------------------------------------------------------

    def server_state(self, space: Space) -> State:
        """Kept at the server."""
        return {}

    def client_state(self, space: Space) -> State:
        """Of ONE client, kept by the client."""
        return {}

    def memory(self, space: Space) -> State:
        """Of ONE client, kept by the server."""
        return {}

    def parts(self, space: Space) -> dict[str, Part]:
        """Named subsets of the model, seen by hooks as me.part[name]."""
        return {}

    def private(self, space: Space) -> Part:
        """Coordinates and buffers that never leave the client."""
        return space.nothing()

    def evaluates(self) -> str:
        """Whose models are measured: "global" x, the "clients"' own, or x with the "mean" of the private parts."""
        return "global"

    def remark(self, space: Space) -> str:
        """Something a person should know about this method on this network, or nothing."""
        return ""

    def phases(self) -> tuple[Algorithm, ...]:
        """The exchanges of one round, same clients in each; a phase is an Algorithm."""
        return (self,)

    # one client -------------------------------------------------------------------------------------------------

    def begin(self, me: Client) -> Tensor:
        """Where local training starts."""
        return me.x

    def carry(self, me: Client) -> State:
        """Own entries of the carry at the start of a phase."""
        return {}

    def loss(self, task: Task, w: Tensor, batch: Batch, me: Client) -> Tensor:
        """What is differentiated; the gradient of a penalty is cheaper in `direction`."""
        return task.loss(w, batch)

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        """The step's direction, before clipping; grad(u) is this batch's gradient at any u."""
        return grad(w)

    def descend(self, w: Tensor, d: Tensor, v: Tensor, me: Client) -> tuple[Tensor, Tensor]:
        """After clipping: weight decay, momentum, step. Returns the new w and the new momentum."""
        if not off(me.decay):
            d = d + me.decay * w
        if not off(me.momentum):
            d = v = me.momentum * v + d
        return stepped(w, d, me.lr), v

    def note(self, w: Tensor, g: Tensor, d: Tensor, me: Client) -> State:
        """New carry entries after a step: g = grad(w), d the direction before clipping."""
        return {}

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        """What goes up and the client's new state. `delta` is reserved: the received model is x + delta."""
        return {"delta": w - me.x}, me.mine

    # the server -------------------------------------------------------------------------------------------------

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        """Weights [C] of the models and of their buffers."""
        return cohort.p

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        """The new x, and every entry of server state and of the participants' memory rows."""
        raise NotImplementedError

    def models(self, x: Tensor, server: State) -> dict[str, Tensor]:
        """What evaluation measures; the first is the headline."""
        return {"global": x}
