"""Algorithm: what a method declares, and the few pure functions in which it differs from FedAvg.

Everything else (loops, batching, devices, transport, storage) is written once, below this interface. A model is a
point in R^P: `w` the global one, `theta` a local one; a cohort is a matrix [C, P]. Client hooks are pure functions of
one `Client`: no `if` on a tensor, no `.item()`, nothing in place, so that the same hook runs in a plain loop, under
vmap and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from ..errors import ConfigError
from .algebra import step_along
from .settings import Settings, is_off, setting
from .space import Space
from .task import Task
from .types import Affine, Batch, Client, Cohort, Part, State

Gradient = Callable[[Tensor], Tensor]  # this batch's gradient at any point of R^P


combined: dict[tuple[type[Algorithm], ...], type[Algorithm]] = {}  # one class for one combination


def combine(method: type[Algorithm], variants: tuple[type[Algorithm], ...]) -> type[Algorithm]:
    """A method's class with the overrides of variants on top, and below them those of a user's own subclass."""
    key = (*variants, method)
    if variants and key not in combined:
        names = {"__module__": method.__module__, "__doc__": method.__doc__, "title": method.display_name()}
        combined[key] = new = type(method.__name__, key, names | {"settings_class": classmethod(lambda cls: method)})
        for name in ("__dataclass_fields__", "__init__"):  # the method's own defaults, not those of a variant's parent
            setattr(new, name, getattr(method, name))
    return combined[key] if variants else method


def refuse_weighting(alg: Algorithm, reason: str) -> None:
    """Refuse another weighting than the method's default, which would have no effect for this reason."""
    if alg.weighting != alg.__dataclass_fields__["weighting"].default:
        raise ConfigError(
            f'{alg.display_name()}: weighting = "{alg.weighting}" has no effect, as {reason}; leave it out.'
        )


class Algorithm(Settings):
    """A federated method. Fields are hyper-parameters; float fields may be 0-d tensors, so no client hook branches on
    one.
    """

    paper: ClassVar[str] = ""  # authors, venue, year
    idea: ClassVar[str] = ""  # one line
    broadcast: ClassVar[tuple[str, ...]] = ()  # server state (the same to all) or memory (to each its row) sent down
    # A look measures at theta, which stays: the client's full "gradient", or its loss on "validation" samples.
    before: ClassVar[tuple[str, ...]] = ()  # These looks come before the first step.
    each: ClassVar[tuple[str, ...]] = ()  # These looks come after every step.
    after: ClassVar[tuple[str, ...]] = ()  # These looks come after the last step.
    trains: ClassVar[bool] = True  # False: this phase only looks
    # "labels", "public", "validation", or a call that the network must offer; refused if missing
    needs: ClassVar[tuple[str, ...]] = ()
    pooled: ClassVar[bool] = False  # one client holds all data
    exact: ClassVar[bool] = False  # claims the exact optimum under skewed data and partial participation; tests measure
    # what the server's step takes from the uploads: their "mean" (or other sums), the "rows" as they differ from each
    # other, their "directions" alone, whole "models", "reports" of clients about themselves, or "nothing"; robust rules
    # ask
    combines: ClassVar[str] = "mean"
    # do all clients send the same kind of upload? Only then is one that is much longer than the others taken for wrong
    alike: ClassVar[bool] = True
    drift_state: ClassVar[str] = ""  # the client state that holds a learned drift, for the drift metrics; "": none
    own_weights: ClassVar[str] = ""  # why `weighting` has no effect; another value than its default is then refused
    # why an answer that started from an older model would be wrong: such rounds are then refused; "": it is sound
    stale: ClassVar[str] = ""

    weighting: str = setting(
        "weights of the clients in averages: by sample count, or all equal",
        default="samples",
        choices=("samples", "uniform"),
    )

    @property
    def by_samples(self) -> bool:
        """Do averages weigh clients by their sample counts?"""
        return self.weighting == "samples"

    def check_learning_rate(self, lr: float) -> None:
        """Refuse, when the configuration loads, what cannot work with this learning rate; raise ConfigError."""

    def divides_by_rate(self) -> str:
        """Which learning rate hooks divide by, "current" or "initial"; "": none. One that is too small is refused."""
        return ""

    def variants(self) -> tuple[type[Algorithm], ...]:
        """The subclasses whose overrides these settings choose; an instance has them on top from its beginning."""
        return ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "__class__", combine(self.settings_class(), self.variants()))
        if self.own_weights:
            refuse_weighting(self, self.own_weights)

    # what it keeps ------------------------------------------------------------------------------------------------

    def server_state(self, space: Space) -> State:
        """The server's state before the first round, by name; [P] vectors and numbers."""
        return {}

    def client_state(self, space: Space) -> State:
        """The state of ONE client before its first round, stored at the client."""
        return {}

    def memory(self, space: Space) -> State:
        """What the server stores of ONE client, before its first round."""
        return {}

    def parts(self, space: Space) -> dict[str, Part]:
        """Named subsets of the model, which hooks find in client.parts."""
        return {}

    def private(self, space: Space) -> Part:
        """Coordinates and buffers that never leave the client."""
        return space.empty_part()

    def evaluates(self) -> str:
        """Whose models are measured: "global" w, the "clients"' own, or w with the "mean" of the private parts."""
        return "global"

    def remark(self, space: Space) -> str:
        """A sentence that a user should know about this method on this network, or nothing."""
        return ""

    def phases(self) -> tuple[Algorithm, ...]:
        """The exchanges of one round, same clients in each; a phase is an Algorithm."""
        return (self,)

    # one client ---------------------------------------------------------------------------------------------------

    def begin(self, client: Client) -> Tensor:
        """The point where local training starts."""
        return client.w

    def carry(self, client: Client) -> State:
        """The method's own entries of client.carry, at the start of a phase.

        The carry is what a client takes from step to step and from phase to phase of one round; it is gone after the
        round. `note` gives new entries after every step.
        """
        return {}

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        """What is differentiated; the gradient of a penalty is cheaper in `direction`."""
        return task.loss(theta, batch)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        """The direction [P] of a local step, before clipping; `grad` gives the batch's gradient at any point."""
        return grad(theta)

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        """The new theta and the new v: weight decay, momentum, step.

        d is the direction after clipping. v is the momentum: a sum of the directions so far, in which older ones count
        less.
        """
        if not is_off(client.decay):
            d = d + client.decay * theta
        if not is_off(client.momentum):
            d = v = client.momentum * v + d
        return step_along(theta, d, client.lr), v

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        """New carry entries after a step: g = grad(theta), d the direction before clipping."""
        return {}

    def affine_step(self, client: Client) -> Affine | None:
        """The class's own direction and descend in one formula, for kernels that take many steps at once; None: no.

        Optional. It counts only for the class that also defines these hooks, and is lost by any subclass that touches a
        part of them (see kernels/affine.py). It is compared with them, at random points and in the first steps.
        """
        return Affine()

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        """The upload and the client's new state. The entry `delta` is reserved: the client's model is w + delta."""
        return {"delta": theta - client.w}, client.state

    # the server ---------------------------------------------------------------------------------------------------

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        """Weights [C] of the models and of their buffers."""
        return cohort.p

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        """The new w, and every entry of server state and of the participants' memory rows."""
        raise NotImplementedError

    def models(self, w: Tensor, server: State) -> dict[str, Tensor]:
        """What evaluation measures; the first is the headline."""
        return {"global": w}
