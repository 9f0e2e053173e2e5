"""What a participation rule is, and what it says of a round: who answers, and with how much of the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..core.rng import generator
from ..core.settings import Settings, is_askews, require_arguments, setting
from ..errors import ConfigError

LONGEST_TEXT = 60  # characters of a value in a sentence
MANY = 10_000  # clients, beyond which a rule does not look for all that are there
SPARSE = 64  # one client of so many is there, or fewer: too few to be found by looking at any


class UsedAnswer(NamedTuple):
    """An answer that a round uses, where answers may come later than in the round in which their clients began."""

    client: int
    round: int  # in which the client began
    batches: int  # that it trained on


class Turnout(NamedTuple):
    """Which of the clients chosen for a round answer, and with how much of the work."""

    ids: np.ndarray  # sorted int64, the clients that answer
    share: np.ndarray  # float64, the fraction of its local steps that each of them does; 1: all
    absent: np.ndarray  # sorted int64, the clients that were chosen and do not answer
    reasons: Mapping[int, str] = MappingProxyType({})  # why an absent client does not, where that is known
    record: Mapping[str, Any] = MappingProxyType({})  # what the round's record says of it beside
    used: Sequence[UsedAnswer] | None = None  # the answers that the round uses, by client; None: those of `ids`


class Participation(Settings):
    """A rule that chooses the clients of a round; the base class of all participation rules."""

    idea: ClassVar[str] = ""  # one line for lists of rules
    dropout: float = setting("chance that a chosen client does not answer", default=0.0, least=0, most=1)
    stragglers: float = setting(
        "chance that an answering client does only part of its local steps", default=0.0, least=0, most=1
    )
    least_work: float = setting(
        "least fraction of its steps that a straggler does; the fraction is uniform between this and 1",
        default=0.1,
        above=0,
        below=1,
    )

    seed: int | None = setting("seed of the participants' draws; left out: the run's", default=None, least=0)

    def check_clients(self, clients: int) -> None:
        """Refuse settings that are impossible with so many clients; called when the configuration loads."""

    def drawn_by(self, seed: int) -> int:
        """The seed that participation is drawn by in a run of this seed."""
        return seed if self.seed is None else self.seed

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """Sorted int64 ids of the clients chosen for a round.

        `eligible` are the ids of the clients that have samples, of N = `clients`.
        """
        raise NotImplementedError

    def draw(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """What `sample` chooses; of a rule that is not askew's own it is checked, and sorted."""
        if is_askews(type(self).sample):
            return self.sample(seed, round, eligible, clients)
        require_arguments(self, "sample")
        return self.checked(self.sample(seed, round, eligible.copy(), clients), round, eligible)

    def checked(self, ids: Any, round: int, eligible: np.ndarray) -> np.ndarray:
        """Ids that a rule returned; refused if they are not different ones of the eligible clients."""
        found = np.asarray(ids)
        if found.ndim == 1 and (found.dtype.kind in "iu" or not len(found)):
            distinct = np.unique(found).astype(np.int64)  # sorted
            places = np.searchsorted(eligible, distinct).clip(max=len(eligible) - 1)
            if len(distinct) == len(found) and np.array_equal(eligible[places], distinct):
                return distinct
        raise ConfigError(
            f"{self.display_name()}: sample() must return ids of eligible clients, each once, as whole numbers, and "
            f"returned {short_text(ids)} in round {round}; correct it."
        )

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        """What `sample` would draw among those of the eligible clients that are there.

        A rule whose `sample` need not know all of them says here how it looks at fewer.
        """
        return self.draw(seed, round, keep(eligible, is_there), clients)

    def with_labels(self, counts: Callable[[], np.ndarray]) -> Self:
        """The rule that knows how many samples of each class every client has [N, K]; itself if it does not ask."""
        return self

    def turnout(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> Turnout:
        """Which of the clients chosen for a round answer, perhaps none, and with how much of the work.

        What happens to client i is the i-th draw of the round, whichever other clients were chosen.
        """
        return self.answering(seed, round, self.draw(self.drawn_by(seed), round, eligible, clients), clients)

    def answering(self, seed: int, round: int, ids: np.ndarray, clients: int) -> Turnout:
        """Which of these clients, which were asked, answer, and with how much of the work."""
        seed = self.drawn_by(seed)
        absent, share = ids[:0], np.ones(len(ids))
        if self.dropout:
            answers = generator(seed, "dropout", round).random(clients)[ids] >= self.dropout
            ids, absent, share = ids[answers], ids[~answers], share[answers]
        if self.stragglers:
            late = generator(seed, "stragglers", round).random(clients)[ids] < self.stragglers
            work = generator(seed, "work", round).random(clients)[ids[late]]
            share[late] = self.least_work + (1 - self.least_work) * work
        return Turnout(ids, share, absent)


def short_text(value: object) -> str:
    """A value as text, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def keep(ids: np.ndarray, is_there: Callable[[int], bool]) -> np.ndarray:
    """Those of the ids that are there."""
    there: np.ndarray = np.fromiter(map(is_there, ids.tolist()), dtype=bool, count=len(ids))
    return np.compress(there, ids)


def looks_at_all(rule: Participation) -> bool:
    """Does a rule look at all clients to draw among those that are there?

    It does too if a class overrides `sample` alone, for which what its base class says in `sample_there` need not hold.
    """
    where = [next(c for c in type(rule).__mro__ if name in vars(c)) for name in ("sample", "sample_there")]
    return where[0] is not where[1]


class CohortParticipation(Participation):
    """A rule that takes m of the clients present, at random without replacement, or all if they are fewer.

    It is the base class of several rules.
    """

    fraction: float = setting("share of the clients that take part in a round", default=0.2, above=0, most=1)
    cohort: int = setting(
        "number of clients that take part in a round, instead of the share; 0: use the share", default=0, least=0
    )

    def check_clients(self, clients: int) -> None:
        if self.cohort > clients:
            raise ConfigError(
                f"{self.display_name()}: cohort must be at most the number of clients, {clients}, got {self.cohort}; "
                "lower participation.cohort or raise partition.clients."
            )

    def size(self, clients: int) -> int:
        """The number m of clients to take, whichever are present."""
        return self.cohort or max(1, round(self.fraction * clients))

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """The eligible clients that can take part in this round, in ascending order."""
        return eligible

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return self.choose(seed, round, self.present(seed, round, eligible, clients), clients)

    def choose(self, seed: int, round: int, present: np.ndarray, clients: int) -> np.ndarray:
        """m of the clients that are present, or all, sorted."""
        m = min(self.size(clients), len(present))
        chosen = generator(seed, "participation", round).choice(len(present), m, replace=False, shuffle=False)
        return np.sort(present[chosen]).astype(np.int64, copy=False)
