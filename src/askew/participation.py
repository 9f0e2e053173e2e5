"""Participation: who takes part in a round and how much of the work each does, a function of the seed and the round alone."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from .core.rng import generator
from .core.settings import Registry, Settings, setting
from .errors import ConfigError, DataError

LEAST_CHANCE = 1e-12  # a client whose share of a skewed draw underflowed still comes when the others are used up


class Turnout(NamedTuple):
    """What became of those chosen for a round."""

    ids: np.ndarray  # sorted int64, those who answer
    share: np.ndarray  # float64, the share of its local steps that each of them does; 1: all
    absent: np.ndarray  # sorted int64, those who were chosen and do not answer


class Participation(Settings):
    """A rule that chooses the clients of a round; the base of all of them."""

    idea: ClassVar[str] = ""
    dropout: float = setting("chance that a chosen client does not answer", default=0.0, least=0, most=1)
    stragglers: float = setting(
        "chance that an answering client does only part of its local steps", default=0.0, least=0, most=1
    )
    least_work: float = setting(
        "least share of its steps that a straggler does; any up to 1 is as likely", default=0.1, above=0, below=1
    )

    seed: int | None = setting("seed of who comes; left out: the run's", default=None, least=0)

    def fit(self, clients: int) -> None:
        """Refuse, when the configuration loads, what cannot be with so many clients."""

    def drawn_by(self, seed: int) -> int:
        """The seed that draws in a run with this one."""
        return seed if self.seed is None else self.seed

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """Sorted int64 ids of the participants; `eligible` are the ids of the clients that have samples, of N = `clients`."""
        raise NotImplementedError

    def turnout(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> Turnout:
        """Who of the sample answers, and with how much of the work; perhaps nobody.

        Client i's fate is the i-th draw of the round, whoever else was chosen.
        """
        seed = self.drawn_by(seed)
        ids = self.sample(seed, round, eligible, clients)
        absent, share = ids[:0], np.ones(len(ids))
        if self.dropout:
            answers = generator(seed, "dropout", round).random(clients)[ids] >= self.dropout
            ids, absent, share = ids[answers], ids[~answers], share[answers]
        if self.stragglers:
            late = generator(seed, "stragglers", round).random(clients)[ids] < self.stragglers
            share[late] = (
                self.least_work + (1 - self.least_work) * generator(seed, "work", round).random(clients)[ids[late]]
            )
        return Turnout(ids, share, absent)


class CohortParticipation(Participation):
    """A rule that takes m of the clients present, at random without replacement, or all if they are fewer; the base of several."""

    fraction: float = setting("share of the clients that take part in a round", default=0.2, above=0, most=1)
    cohort: int = setting(
        "number of clients that take part in a round, instead of the share; 0: use the share", default=0, least=0
    )

    def fit(self, clients: int) -> None:
        if self.cohort > clients:
            raise ConfigError(
                f"{self.called()}: cohort must be at most the number of clients, {clients}, got {self.cohort}; "
                "lower participation.cohort or raise partition.clients."
            )

    def size(self, clients: int) -> int:
        """m, before looking at who is present."""
        return self.cohort or max(1, round(self.fraction * clients))

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """The eligible clients that could come this round."""
        return eligible

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        present = self.present(seed, round, eligible, clients)
        m = min(self.size(clients), len(present))
        chosen = generator(seed, "participation", round).choice(len(present), m, replace=False, shuffle=False)
        return np.sort(present[chosen]).astype(np.int64, copy=False)


class Uniform(CohortParticipation):
    """m clients at random without replacement: m = max(1, round(fraction·N)), or `cohort`; all eligible ones if they are fewer."""

    idea: ClassVar[str] = "a fixed number of clients, all equally likely, without replacement"


class Full(Participation):
    """Everybody, every round."""

    idea: ClassVar[str] = "all clients, every round"

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.sort(eligible).astype(np.int64, copy=False)


class Bernoulli(Participation):
    """Each client comes or not independently of the others, drawn again until somebody came (FedDyn's and FedDC's code)."""

    idea: ClassVar[str] = "every client comes with the same chance, independently: the number varies, at least one"
    fraction: float = setting("chance that a client takes part in a round", default=0.2, above=0, most=1)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rng, n = generator(seed, "participation", round), len(eligible)
        came = rng.random(clients)[eligible] < self.fraction
        if n and not came.any():
            # Where drawing again and again ends, at once, however small the chance is: the first who comes is a geometric draw
            # cut off at n, and those behind are free.
            stays = math.log1p(-self.fraction)
            first = min(int(math.log1p(rng.random() * math.expm1(n * stays)) / stays), n - 1)
            came = rng.random(n) < self.fraction
            came[:first], came[first] = False, True
        return np.sort(eligible[came]).astype(np.int64, copy=False)


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
        # A race: exponential times of rates p come in the order of successive draws from p, each renormalised over those left.
        times = (
            generator(seed, "participation", round).standard_exponential(clients) / chances(seed, clients, self.gamma)
        )[eligible]
        winners = eligible[np.argpartition(times, m)[:m]] if m < len(eligible) else eligible
        return np.sort(winners).astype(np.int64, copy=False)


@lru_cache(maxsize=8)
def chances(seed: int, clients: int, gamma: float) -> np.ndarray:
    """p ~ Dir_N(1/γ) of one run, cut off below."""
    # 1e12: spread over the clients by a millionth, and far from an overflow.
    p = np.maximum(generator(seed, "chances").dirichlet(np.full(clients, min(1 / gamma, 1e12))), LEAST_CHANCE)
    p.flags.writeable = False
    return p


class Cyclic(CohortParticipation):
    """Groups of equal size take turns, round by round; m clients at random of the group whose turn it is, all of them if they are fewer."""

    idea: ClassVar[str] = "fixed groups of clients take turns, as day follows night"
    groups: int = setting("number of groups", default=5, least=1)
    shuffle: bool = setting(
        "form the groups at random, once; false: by id, the first N / groups clients first", default=True
    )

    def fit(self, clients: int) -> None:
        super().fit(clients)
        if self.groups > clients:
            raise ConfigError(
                f"{self.called()}: groups must be at most the number of clients, {clients}, got {self.groups}; "
                "lower participation.groups or raise partition.clients."
            )

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        group = membership(seed if self.shuffle else None, clients, self.groups)[eligible]
        return np.compress(group == (round - 1) % self.groups, eligible)


@lru_cache(maxsize=8)
def membership(seed: int | None, clients: int, groups: int) -> np.ndarray:
    """The group of every client; by id without a seed. Sizes differ by at most one."""
    place = np.arange(clients) if seed is None else generator(seed, "groups").permutation(clients)
    group = place * groups // clients
    group.flags.writeable = False
    return group


class Markov(CohortParticipation):
    """Every client is a chain of its own, there or away; m clients at random of those there, all if they are fewer, perhaps nobody.

    In round 1 a client is there with the chance of the stationary law, join / (join + leave): so it is in every round, and
    its states t rounds apart are correlated by (1 − join − leave)^t.
    """

    idea: ClassVar[str] = "clients come and go: each stays there or away for a while"
    join: float = setting("chance that a client that is away is there in the next round", default=0.1, above=0, most=1)
    leave: float = setting("chance that a client that is there is away in the next round", default=0.1, least=0, most=1)

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.compress(self.there(seed, round, clients)[eligible], eligible)

    def there(self, seed: int, round: int, clients: int) -> np.ndarray:
        """The state of every client, bool [N]; the round after the one asked last costs one step, an earlier one all from the first."""
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
    """Where one run's chains keep the round asked last and its states: one item, replaced as a whole; round 0: not asked yet."""
    return [(0, np.zeros(0, dtype=bool))]


class Trace(Participation):
    """Those come whom a file names: as it was observed, or as another program drew it.

    A .json file is a list of rounds, each a list of client ids from 0 to N − 1; a .npy file is a bool array [rounds, N].
    """

    idea: ClassVar[str] = "a file says who comes in each round"
    path: str = setting("the .json or .npy file; a relative path starts from the working folder", default="")
    repeat: bool = setting("begin again after the file's last round; false: nobody comes any more", default=True)

    def fit(self, clients: int) -> None:
        self.rows(clients)

    def reads(self) -> tuple[Path, ...]:
        return (Path(self.path),)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rows = self.rows(clients)
        ids = rows[(round - 1) % len(rows)] if self.repeat or round <= len(rows) else rows[0][:0]
        return ids[np.isin(ids, eligible)]

    def rows(self, clients: int) -> tuple[np.ndarray, ...]:
        """Sorted ids, round by round; a sentence if the file does not say them."""
        path = Path(self.path)
        if path.suffix not in READERS:
            raise ConfigError(
                f"{self.called()}: path must name a .json or .npy file that says who comes in each round, got {self.path!r}; "
                "set participation.path."
            )
        try:
            stat = path.stat()
            return trace(path, stat.st_mtime_ns, stat.st_size, clients)
        except OSError as problem:
            reason = problem.strerror or type(problem).__name__
        except (ValueError, RecursionError) as problem:
            reason = str(problem)
        raise DataError(
            f"{self.called()}: cannot use {path}: {reason}; mend the file or name another one in participation.path."
        )


@lru_cache(maxsize=8)
def trace(path: Path, changed: int, size: int, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a file; time of change and size are there so that a new version is read again."""
    return READERS[path.suffix](path, clients)


def listed(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """Rounds from a list of lists of ids."""
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


def ticked(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """Rounds from a bool array; mapped, so that nothing is unpickled and a false header allocates nothing."""
    try:
        page = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError):
        raise ValueError("it is empty, damaged or no plain array of numpy.save") from None
    if page.dtype != bool or page.shape[1:] != (clients,) or not len(page):
        raise ValueError(
            f"it must be a bool array [rounds, {clients}] of one round or more, got {page.dtype} {list(page.shape)}"
        )
    return tuple(np.flatnonzero(row).astype(np.int64, copy=False) for row in page)


READERS = {".json": listed, ".npy": ticked}

participations: Registry[Participation] = Registry(
    "participation",
    {
        "bernoulli": Bernoulli,
        "cyclic": Cyclic,
        "full": Full,
        "markov": Markov,
        "skewed": Skewed,
        "trace": Trace,
        "uniform": Uniform,
    },
)
