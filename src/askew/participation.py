"""Participation: which clients take part in a round, and how much of its local work each does.

Both are a function of the seed and the round alone; one rule also asks for the clients' labels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from .core.files import is_readable_file, map_array
from .core.rng import generator
from .core.settings import Registry, Settings, setting
from .errors import ConfigError, DataError

LEAST_CHANCE = 1e-12  # probability; a client whose part in a skewed draw underflowed still comes when no other is left
MANY = 10_000  # clients, beyond which a rule does not look for all that are there
MAX_CONCENTRATION = 1e12  # of a Dirichlet: clients' chances differ by a millionth, and nothing overflows


class UsedAnswer(NamedTuple):
    """An answer that a round uses, where answers may come later than in the round in which their clients began."""

    client: int
    round: int  # in which the client began
    share: float  # the fraction of its local steps that it did


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

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        """What `sample` would draw among those of the eligible clients that are there.

        A rule whose `sample` need not know all of them says here how it looks at fewer.
        """
        return self.sample(seed, round, keep(eligible, is_there), clients)

    def with_labels(self, counts: Callable[[], np.ndarray]) -> Self:
        """The rule that knows how many samples of each class every client has [N, K]; itself if it does not ask."""
        return self

    def turnout(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> Turnout:
        """Which of the clients chosen for a round answer, perhaps none, and with how much of the work.

        What happens to client i is the i-th draw of the round, whichever other clients were chosen.
        """
        return self.answering(seed, round, self.sample(self.drawn_by(seed), round, eligible, clients), clients)

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


class Uniform(CohortParticipation):
    """m clients at random without replacement: m = max(1, round(fraction·N)), or `cohort`.

    If fewer clients are eligible, all of them take part.
    """

    idea: ClassVar[str] = "a fixed number of clients, all equally likely, without replacement"


class FullParticipation(Participation):
    """Everybody, every round."""

    title: ClassVar[str] = "Full"
    idea: ClassVar[str] = "all clients, every round"

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.sort(eligible).astype(np.int64, copy=False)


class Bernoulli(Participation):
    """Each client takes part with a given chance, independently; drawn again while nobody does (as in FedDC's code)."""

    idea: ClassVar[str] = "every client comes with the same chance, independently: the number varies, at least one"
    fraction: float = setting("chance that a client takes part in a round", default=0.2, above=0, most=1)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rng, n = generator(seed, "participation", round), len(eligible)
        came = rng.random(clients)[eligible] < self.fraction
        if n and not came.any():
            # What drawing again and again ends with, in one draw, however small the chance is.
            first = self.first_to_come(rng, n)
            came = rng.random(n) < self.fraction
            came[:first], came[first] = False, True
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def first_to_come(self, rng: np.random.Generator, n: int) -> int:
        """Which of n clients is the first that comes, given that one does: a geometric draw cut off at n."""
        if self.fraction == 1:
            return 0
        log_absent = math.log1p(-self.fraction)
        return min(int(math.log1p(rng.random() * math.expm1(n * log_absent)) / log_absent), n - 1)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        came = keep(self.sample(seed, round, eligible, clients), is_there)
        looked, n, rng = 0, len(eligible), generator(seed, "time others", round)
        while not len(came) and n > MANY and looked < n:  # draw again, how many come and then who, until somebody does
            count = 1 + int(rng.binomial(n - 1 - self.first_to_come(rng, n), self.fraction))
            came, looked = keep(eligible[rng.choice(n, count, replace=False)], is_there), looked + count
        if not len(came):
            return super().sample_there(seed, round, eligible, clients, is_there)
        return np.sort(came).astype(np.int64, copy=False)


class Poisson(Participation):
    """Each client takes part with a given chance, independently; there may be none. Differential privacy counts on
    this rule where participants are secret.
    """

    idea: ClassVar[str] = "every client comes with the same chance, independently: the number varies, perhaps none"
    fraction: float = setting("chance that a client takes part in a round", default=0.2, above=0, most=1)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        came = generator(seed, "participation", round).random(clients)[eligible] < self.fraction
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)


class Uneven(Participation):
    """Each client takes part with a chance of its own, independently; there may be none.

    The chances p_i ~ Beta(fraction/γ, (1 − fraction)/γ) are drawn once a run, multiplied so that their mean is
    `fraction`, and cut off at 1. γ = 0 is `poisson`, draw for draw.
    """

    idea: ClassVar[str] = "every client comes with a chance of its own, independently: some often, some hardly ever"
    fraction: float = setting("mean chance that a client takes part in a round", default=0.2, above=0, below=1)
    gamma: float = setting(
        "how uneven the chances are, 1 / the concentration of their Beta distribution; 0: all are the same",
        default=0.2,
        least=0,
        most=1000,
    )

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        own = own_chances(seed, clients, self.fraction, self.gamma) if self.gamma else np.full(clients, self.fraction)
        came = (generator(seed, "participation", round).random(clients) < own)[eligible]
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)


@lru_cache(maxsize=8)
def own_chances(seed: int, clients: int, fraction: float, gamma: float) -> np.ndarray:
    """The chance of every client in one run, p_i ~ Beta(fraction/γ, (1 − fraction)/γ) with the mean `fraction` [N]."""
    drawn = np.maximum(generator(seed, "chances").beta(fraction / gamma, (1 - fraction) / gamma, clients), LEAST_CHANCE)
    p: np.ndarray = np.minimum(drawn * (fraction / drawn.mean()), 1.0)
    p.flags.writeable = False
    return p


class Skewed(CohortParticipation):
    """m clients, one after the other without replacement, with chances p ~ Dir_N(1/γ) drawn once a run (MLDL24).

    p is cut off below at 1e-12; among the eligible it is renormalised. γ = 0 is `uniform`, draw for draw.
    """

    idea: ClassVar[str] = "chances of taking part drawn once from a Dirichlet; large gamma: always the same few"
    gamma: float = setting(
        "skew, 1 / the Dirichlet's concentration; 0: all clients equally likely", default=1.0, least=0
    )

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        if self.gamma == 0:
            return super().sample(seed, round, eligible, clients)
        m = min(self.size(clients), len(eligible))
        times = self.times(seed, round, clients)[eligible]
        earliest = eligible[np.argpartition(times, m)[:m]] if m < len(eligible) else eligible
        return np.sort(earliest).astype(np.int64, copy=False)

    def times(self, seed: int, round: int, clients: int) -> np.ndarray:
        """When each client would be drawn, float64 [N].

        Exponential times of rates p come in the order of successive draws from p, each renormalised over those left:
        so the m earliest are m draws without replacement.
        """
        times: np.ndarray = generator(seed, "participation", round).standard_exponential(clients)
        times /= chances(seed, clients, self.gamma)
        return times

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        wanted, times = self.size(clients), self.times(seed, round, clients)[eligible]
        found, looked, upto = list[int](), 0, 16 * wanted
        while len(found) < wanted and looked < len(times):
            first = np.argpartition(times, upto)[:upto] if upto < len(times) else np.arange(len(times))
            order = eligible[first[np.argsort(times[first])][looked:]].tolist()
            found += islice(filter(is_there, order), wanted - len(found))
            looked, upto = len(first), 16 * upto
        return np.array(sorted(found), dtype=np.int64)


@lru_cache(maxsize=8)
def chances(seed: int, clients: int, gamma: float) -> np.ndarray:
    """The chances p ~ Dir_N(1/γ) of the clients in one run, cut off below, float64 [N]."""
    concentration = min(1 / gamma, MAX_CONCENTRATION)
    p = np.maximum(generator(seed, "chances").dirichlet(np.full(clients, concentration)), LEAST_CHANCE)
    p.flags.writeable = False
    return p


class Cyclic(CohortParticipation):
    """Groups of equal size take turns, round by round; m clients of the group whose turn it is take part.

    They are drawn at random; if the group has fewer, all of it takes part.
    """

    idea: ClassVar[str] = "fixed groups of clients take turns, as time zones do over a day"
    groups: int = setting("number of groups", default=5, least=1)
    shuffle: bool = setting(
        "form the groups at random, once; false: by id, the first N / groups clients first", default=True
    )

    def check_clients(self, clients: int) -> None:
        super().check_clients(clients)
        if self.groups > clients:
            raise ConfigError(
                f"{self.display_name()}: groups must be at most the number of clients, {clients}, got {self.groups}; "
                "lower participation.groups or raise partition.clients."
            )

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        group = membership(seed if self.shuffle else None, clients, self.groups)[eligible]
        return np.compress(group == (round - 1) % self.groups, eligible)


@lru_cache(maxsize=8)
def membership(seed: int | None, clients: int, groups: int) -> np.ndarray:
    """The group of every client, int64 [N], whose sizes differ by at most one; by id without a seed, else at random."""
    place = np.arange(clients) if seed is None else generator(seed, "groups").permutation(clients)
    group = place * groups // clients
    group.flags.writeable = False
    return group


class Markov(CohortParticipation):
    """Every client is a Markov chain of its own, available or absent; m available clients at random take part.

    If fewer are there, all of them take part; there may be none. In round 1 a client is there with the stationary
    chance, join / (join + leave): so it is in every round, and its states t rounds apart are correlated by
    (1 − join − leave)^t.
    """

    idea: ClassVar[str] = "clients come and go: each stays there or away for a while"
    join: float = setting("chance that an absent client is available in the next round", default=0.1, above=0, most=1)
    leave: float = setting("chance that an available client is absent in the next round", default=0.1, least=0, most=1)

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.compress(self.available(seed, round, clients)[eligible], eligible)

    def available(self, seed: int, round: int, clients: int) -> np.ndarray:
        """Which clients are available in a round, bool [N].

        The round after the one asked last costs one step of the chains, an earlier one all steps from the first.
        """
        latest = latest_state(seed, clients, self.join, self.leave)
        t, state = latest[0]
        if t == 0 or t > round:
            t, state = 1, generator(seed, "availability", 1).random(clients) < self.join / (self.join + self.leave)
        while t < round:
            t += 1
            state = generator(seed, "availability", t).random(clients) < np.where(state, 1 - self.leave, self.join)
        state.flags.writeable = False
        latest[0] = t, state
        return state


@lru_cache(maxsize=8)
def latest_state(seed: int, clients: int, join: float, leave: float) -> list[tuple[int, np.ndarray]]:
    """The round of one run's chains that was asked last, and its states; round 0: none was asked yet.

    They are the one item of a list, which is replaced as a whole.
    """
    return [(0, np.zeros(0, dtype=bool))]


class ByClass(Participation):
    """Each client takes part with a chance that follows from its classes, independently; there may be none.

    p_i(t) = f(t) Σ_c ν_ic φ_c: ν_ic is the share of class c among the client's samples. φ_c is uniform between 0 and
    `high` for the first half of the classes and between 0 and `low` for the others, drawn once a run.
    f(t) = 1 − swing + swing · sin(2π (t − 1) / period). As in FedAWE (Xiang et al., NeurIPS 2024, Appendix J.3).
    """

    idea: ClassVar[str] = "clients come with chances that follow from their classes, and that may rise and fall"
    high: float = setting("largest φ of the first half of the classes", default=1.0, above=0, most=1)
    low: float = setting("largest φ of the other classes", default=0.5, above=0, most=1)
    swing: float = setting("how far chances rise and fall, as a share; 0: they stay", default=0.0, least=0, most=0.5)
    period: int = setting("rounds after which they have risen and fallen once", default=20, least=1)
    shares: ClassVar[np.ndarray | None] = None  # of the classes [N, K], of an instance that knows the labels

    def with_labels(self, counts: Callable[[], np.ndarray]) -> Self:
        rule, held = replace(self), counts()
        if held.shape[1] < 2:
            raise ConfigError(
                f"{self.display_name()}: chances follow from classes, which these data do not have; "
                'set participation.name = "bernoulli".'
            )
        object.__setattr__(rule, "shares", held / np.maximum(held.sum(1, keepdims=True), 1))
        return rule

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        came = generator(seed, "participation", round).random(clients) < self.chances(seed, round, clients)
        return np.sort(eligible[came[eligible]]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)

    def chances(self, seed: int, round: int, clients: int) -> np.ndarray:
        """p_i(t) of all clients [N]; their mean over all φ where labels are not known, for estimates of cost."""
        factor = 1 - self.swing + self.swing * math.sin(2 * math.pi * (round - 1) / self.period)
        if self.shares is None:
            return np.full(clients, factor * (self.high + self.low) / 4)
        classes = self.shares.shape[1]
        phi = generator(seed, "chances").random(classes)
        return factor * self.shares @ (phi * np.where(np.arange(classes) < classes // 2, self.high, self.low))


class Trace(Participation):
    """The clients that a file names take part: as it was observed, or as another program drew it.

    A .json file is a list of rounds, each a list of client ids from 0 to N − 1. A .npy file is a bool array
    [rounds, N].
    """

    idea: ClassVar[str] = "a file says who comes in each round"
    path: str = setting("the .json or .npy file; a relative path starts from the working folder", default="")
    repeat: bool = setting("begin again after the file's last round; false: later rounds have no clients", default=True)

    def check_clients(self, clients: int) -> None:
        self.rows(clients)

    def reads(self) -> tuple[Path, ...]:
        return (Path(self.path),)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rows = self.rows(clients)
        ids = rows[(round - 1) % len(rows)] if self.repeat or round <= len(rows) else rows[0][:0]
        return ids[np.isin(ids, eligible)]

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)

    def rows(self, clients: int) -> tuple[np.ndarray, ...]:
        """The sorted ids of every round of the file; an error if the file cannot be used."""
        path = Path(self.path)
        if path.suffix not in READERS:
            raise ConfigError(
                f"{self.display_name()}: path must name a .json or .npy file that says who comes in each round, "
                f"got {self.path!r}; set participation.path."
            )
        try:
            if path.exists() and not is_readable_file(path):
                raise ValueError("it is no regular file, or far too large")
            stat = path.stat()
            return read_trace(path, stat.st_mtime_ns, stat.st_size, clients)
        except OSError as problem:
            reason = problem.strerror or type(problem).__name__
        except (ValueError, RecursionError) as problem:
            reason = str(problem)
        raise DataError(
            f"{self.display_name()}: cannot use {path}: {reason}; "
            "mend the file or name another one in participation.path."
        )


@lru_cache(maxsize=8)
def read_trace(path: Path, changed: int, size: int, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a file; the time of its last change and its size are there so that a new version is read again."""
    return READERS[path.suffix](path, clients)


def read_json(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a JSON file, a list of lists of ids."""
    page = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(page, list) or not page or not all(isinstance(row, list) for row in page):
        raise ValueError("it must be a list of rounds, one or more, each a list of client ids")
    for t, row in enumerate(page, 1):
        for i in row:
            if type(i) is not int or not 0 <= i < clients:
                raise ValueError(
                    f"its round {t} names {json.dumps(i):.40}, but ids are whole numbers from 0 to {clients - 1}"
                )
        if len(set(row)) < len(row):
            raise ValueError(f"its round {t} names a client twice")
    return tuple(np.array(sorted(row), dtype=np.int64) for row in page)


def read_npy(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a numpy file, a bool array."""
    page = map_array(path)
    if page.dtype != bool or page.shape[1:] != (clients,) or not len(page):
        raise ValueError(
            f"it must be a bool array [rounds, {clients}] of one round or more, got {page.dtype} {list(page.shape)}"
        )
    return tuple(np.flatnonzero(row).astype(np.int64, copy=False) for row in page)


READERS = {".json": read_json, ".npy": read_npy}

participations: Registry[Participation] = Registry(
    "participation",
    {
        "bernoulli": Bernoulli,
        "by_class": ByClass,
        "cyclic": Cyclic,
        "full": FullParticipation,
        "markov": Markov,
        "poisson": Poisson,
        "skewed": Skewed,
        "trace": Trace,
        "uneven": Uneven,
        "uniform": Uniform,
    },
)
