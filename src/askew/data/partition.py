"""Partitions: which client owns which training samples, a function of the labels and the seed.

Every sample belongs to exactly one client, except where a rule says otherwise.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..core.rng import generator
from ..core.settings import Settings, require_arguments, setting
from ..core.text import count_text
from ..errors import DataError
from .assignment import (
    Assignment,
    checked_assignment,
    class_sizes,
    deal_samples,
    deal_sizes,
    even_sizes,
    group_by_owner,
    lognormal_sizes,
    shuffle_within_classes,
)

MAX_DRAWS = 2000  # whole partitions drawn before giving up
BLOCK = 1 << 22  # choices of a client that are drawn at once
CELLS = 1 << 18  # cells of a table of draws and classes: small enough that draws thrown away cost little


class Partition(Settings):
    """A rule that divides samples among clients; the base class of all partitions."""

    idea: ClassVar[str] = ""  # one line for lists of partitions
    clients: int = setting("number of clients", default=30, least=1)
    validation: float | None = setting(
        "share of each client's samples held out for validation; left out: 0.2 where the algorithm needs it",
        default=None,
        least=0,
        below=1,
    )
    public: int | None = setting(
        "samples the server takes from the training data, by class; left out: a tenth, at most 1,000, "
        "where the algorithm needs them",
        default=None,
        least=0,
    )
    noise: float = setting(
        "standard deviation of Gaussian noise on the last client's inputs, whose full range is 1; "
        "client i of 0…N−1 has i/(N−1) of it",
        default=0.0,
        least=0,
    )
    rotation: float = setting(
        "degrees by which the last client's images are turned counterclockwise; client i of 0…N−1 has i/(N−1) of it",
        default=0.0,
    )

    seed: int | None = setting(
        "seed of who holds what, and of what the server takes; left out: the run's", default=None, least=0
    )

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        """Who owns which of n samples, by their labels [n] and, where they are known, their natural clients [n]."""
        raise NotImplementedError

    def divide(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        """What `split` returns, after a check; it gets copies, so that it cannot change the samples."""
        require_arguments(self, "split")
        given = self.split(labels.copy(), seed, None if owner is None else owner.copy())
        return checked_assignment(given, len(labels), self.clients, f"the partition {self.display_name()}")


class Iid(Partition):
    """Shuffle all samples and cut them into parts whose sizes differ by at most one.

    Balanced: the numbers of samples of each class differ by at most one between clients as well.
    """

    idea: ClassVar[str] = "shuffle and cut into equal parts"
    balanced: bool = setting("of each class, clients get numbers of samples that differ by at most one", default=False)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        rng = generator(seed, "partition")
        if not self.balanced:
            return deal_sizes(even_sizes(len(labels), self.clients), rng)
        totals = class_sizes(labels, "balanced iid")
        counts = np.repeat(totals[:, None] // self.clients, self.clients, axis=1)
        extra = np.zeros(self.clients, dtype=np.int64)
        for row, remainder in zip(counts, totals % self.clients, strict=True):
            # Those with the fewest so far, ties at random: nobody is ever more than one ahead.
            more = np.lexsort((rng.random(self.clients), extra))[:remainder]
            row[more] += 1
            extra[more] += 1
        return deal_samples(labels, totals, counts, rng)


class Lognormal(Partition):
    """Unequal sizes, labels iid: s_i ~ LogNormal(log(n/N), σ), scaled to sum to n (FedDyn, Acar et al., ICLR 2021).

    As in the authors' code sizes are floored, so that a client may get nothing, and the first client takes what
    flooring left: about N/2 samples, many if N is large.
    """

    idea: ClassVar[str] = "iid labels, sizes from a lognormal distribution"
    sigma: float = setting("spread of the logarithm of the sizes; 0: equal sizes", default=0.3, least=0, most=100)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        rng = generator(seed, "partition")
        return deal_sizes(lognormal_sizes(len(labels), self.clients, self.sigma, rng), rng)


class Dirichlet(Partition):
    """Class r goes to the clients in proportions P_r ~ Dir_N(α) (Yurochkin et al., ICML 2019).

    As in the authors' code, classes are divided one after the other, clients holding ≥ n/N samples get no more (`cap`),
    and the whole draw is repeated until every client has `min_size` samples. With `overlap`, as FedPMVR's code has it,
    every client draws its ⌊P_rj n_r⌋ samples from the whole class: clients share samples, and some have no client.
    """

    idea: ClassVar[str] = (
        "each class is divided in Dirichlet(alpha) proportions; small alpha: few classes a client, unequal sizes"
    )
    alpha: float = setting("concentration; small is skewed, 100 nearly iid", default=0.2, above=0)
    cap: bool = setting("a client holding its n/N samples gets nothing of the classes that follow", default=True)
    min_size: int = setting("draw again until every client has at least this many samples", default=10, least=0)
    overlap: bool = setting("every client draws from the whole class, so that clients share samples", default=False)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        n, totals = len(labels), class_sizes(labels, "dirichlet")
        if n < self.clients * self.min_size:
            raise DataError(
                f"{n} samples cannot give {count_text(self.clients, 'client')} partition.min_size = {self.min_size} "
                f"each; "
                f"at most {n // self.clients} is possible: lower partition.min_size or partition.clients."
            )
        rng = generator(seed, "partition")
        best = -1
        for _ in range(MAX_DRAWS):
            counts = self.draw_counts(totals, rng)
            smallest = int(counts.sum(0).min())
            if smallest >= self.min_size:
                break
            best = max(best, smallest)
        else:
            raise DataError(
                f"no client may have fewer than partition.min_size = {self.min_size} samples, yet in {MAX_DRAWS} draws "
                f"with alpha = {self.alpha:g} and {self.clients} clients the smallest never had more than {best}; "
                f"set partition.min_size to {best} or less, raise partition.alpha or take fewer clients."
            )
        deal = deal_overlapping if self.overlap else deal_samples
        return deal(labels, totals, counts, rng)

    def draw_counts(self, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw: how many samples of each class every client gets, int64 [classes, N]."""
        counts = np.empty((len(totals), self.clients), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        full = -(-int(totals.sum()) // self.clients) if self.cap else np.inf
        for row, total in zip(counts, totals, strict=True):
            proportions = rng.dirichlet(np.full(self.clients, self.alpha))
            # Not everybody can be full before the last sample is dealt: somebody always has room.
            room = held < full
            proportions[~room] = 0
            if not proportions.sum() > 0:
                # A tiny alpha leaves one client with all of the mass, and that one may be full (or all proportions may
                # underflow): renormalised Dirichlet proportions tend to a random corner as alpha → 0, so one client
                # with room gets the class.
                proportions[:] = np.arange(self.clients) == rng.choice(np.flatnonzero(room))
            if self.overlap:
                row[:] = proportions / proportions.sum() * total
            else:
                edges = proportions.cumsum()
                # Divided by the last edge, which becomes exactly 1: a full last client is left nothing by rounding.
                row[:] = np.diff(np.floor(edges / edges[-1] * total).astype(np.int64), prepend=0)
            held += row
        return counts


def deal_overlapping(
    labels: np.ndarray, totals: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> Assignment:
    """An assignment in which every client draws `counts` [classes, N] samples from each whole class.

    A client draws no sample twice, but clients may draw the same.
    """
    clients = np.arange(counts.shape[1])
    owners, samples = [], []
    for members, row in zip(np.split(np.argsort(labels, kind="stable"), np.cumsum(totals)[:-1]), counts, strict=True):
        total = len(members)
        # A pair (client, place in the class) is the number client·total + place; one drawn before is drawn again.
        # A client that takes more than half of the class, one at most, draws what it leaves.
        wanted = np.minimum(row, total - row)
        pairs = np.empty(0, dtype=np.int64)
        while (lacking := wanted - np.bincount(pairs // total, minlength=len(clients))).any():
            places = rng.integers(total, size=int(lacking.sum()))
            pairs = np.union1d(pairs, np.repeat(clients, lacking) * total + places)
        for client in np.flatnonzero(row > wanted):
            pairs = np.setxor1d(pairs, client * total + np.arange(total))
        owners.append(pairs // total)
        samples.append(members[pairs % total])
    owner, sample = np.concatenate(owners), np.concatenate(samples)
    offsets = np.append(0, np.cumsum(counts.sum(0)))
    return Assignment(sample[np.lexsort((sample, owner))], offsets)


class DirichletPrior(Partition):
    """Client i draws its samples' classes from a prior q_i ~ Dir_K(α).

    As in FedDyn (Acar et al., ICLR 2021) and FedDC (Gao et al., CVPR 2022). Sizes first, as in the lognormal
    partition. Then, until all is handed out: a client not yet full, each as likely, gets one sample of a class drawn
    from q_i, renormalised over the classes with samples left. Sizes are exact, priors hold until classes run out.
    """

    idea: ClassVar[str] = "each client has a Dirichlet(alpha) prior over the classes; equal sizes, or lognormal ones"
    alpha: float = setting("concentration; small is skewed", default=0.6, above=0)
    sigma: float = setting("spread of the logarithm of the sizes; 0: equal sizes", default=0.0, least=0, most=100)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        totals = class_sizes(labels, "dirichlet_prior")
        rng = generator(seed, "partition")
        served = serving_order(lognormal_sizes(len(labels), self.clients, self.sigma, rng), rng)
        classes = self.draw_classes(served, totals, rng)
        holder = np.empty(len(labels), dtype=np.int64)
        holder[shuffle_within_classes(labels, totals, rng)] = served[np.argsort(classes, kind="stable")]
        return group_by_owner(holder, self.clients)

    def draw_classes(self, served: np.ndarray, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The class of the sample that each client gets in the order in which clients are `served`, int64 [n].

        While no class runs out the draws are independent: they are made in blocks, and those after a class ran out are
        made again.
        """
        # Logarithms of Gamma(α) variates, by Gamma(α) = Gamma(α + 1) U^(1/α): a tiny α cannot underflow, however few
        # classes are left.
        shape, alpha = (self.clients, len(totals)), min(max(self.alpha, 1e-300), 1e300)
        prior = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
        left, drawn, at = totals.copy(), np.empty(len(served), dtype=np.int64), 0
        while at < len(served):
            weights = prior[served[at : at + max(1, CELLS // len(totals))]]
            weights[:, left == 0] = -np.inf
            edges = np.exp(weights - weights.max(1, keepdims=True)).cumsum(1)
            block = (edges > rng.random((len(edges), 1)) * edges[:, -1:]).argmax(1)
            run_out = np.flatnonzero((left > 0) & (left <= np.bincount(block, minlength=len(left))))  # in this block
            valid = block[: min((np.flatnonzero(block == k)[left[k] - 1] + 1 for k in run_out), default=len(block))]
            drawn[at : at + len(valid)] = valid
            left -= np.bincount(valid, minlength=len(left))
            at += len(valid)
        return drawn


def serving_order(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The order in which clients get their samples: each time one of those not yet full, all equally likely.

    Choices are drawn in blocks among the clients not full as the block begins; a choice of one that is full by then is
    thrown away, as a draw by rejection may.
    """
    left, served = sizes.copy(), [np.empty(0, dtype=np.int64)]
    while len(not_full := np.flatnonzero(left)):
        choices = rng.choice(not_full, min(int(left.sum()), BLOCK))
        counts = np.bincount(choices, minlength=len(left))
        earlier = np.empty(len(choices), dtype=np.int64)  # choices of the same client before each one in this block
        earlier[np.argsort(choices, kind="stable")] = np.arange(len(choices)) - np.repeat(
            np.cumsum(counts) - counts, counts
        )
        served.append(choices[earlier < left[choices]])
        left -= np.minimum(counts, left)
    return np.concatenate(served)


class LabelsPerClient(Partition):
    """Each client holds N_c labels, about n/(N·N_c) samples of each (MLDL24).

    One client after the other chooses N_c classes at random among those with samples left. It takes ⌊⌊n/N⌋/N_c⌋
    samples of each, or all that are left where fewer would remain. Nothing balances the choice: the last clients may
    find fewer classes, or none, and the samples that remain belong to no client.

    Balanced: all samples are assigned. There are N·N_c places, each of one client for one class. They are given to the
    classes one by one, each time to the class with the most samples a place; a class has at least one place and at most
    N. One client after the other then chooses N_c classes with places left, with chances in proportion to these
    places; a class with a place for every client that follows must be chosen. A class's samples are divided evenly
    among its places.
    """

    idea: ClassVar[str] = "every client holds a fixed number of labels"
    labels: int = setting("number of labels of a client, N_c", default=5, least=1)
    balanced: bool = setting(
        "assign every sample, with N_c labels for every client; else the last clients may get fewer", default=False
    )

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        n, totals = len(labels), class_sizes(labels, "labels")
        quota = n // self.clients // self.labels
        if self.labels > len(totals):
            raise DataError(
                f"a client cannot hold partition.labels = {self.labels} labels of {len(totals)} classes; "
                f"set partition.labels to {len(totals)} or less."
            )
        if quota == 0:
            raise DataError(
                f"{n:,} samples cannot give {self.clients:,} clients one sample of each of partition.labels = "
                f"{self.labels} labels; lower partition.labels or partition.clients."
            )
        rng = generator(seed, "partition")
        counts = self.balanced_counts(totals, rng) if self.balanced else self.quota_counts(totals, quota, rng)
        return deal_samples(labels, totals, counts, rng)

    def quota_counts(self, totals: np.ndarray, quota: int, rng: np.random.Generator) -> np.ndarray:
        """How many samples of each class every client gets, int64 [classes, N]: `quota` of each of its labels.

        The last one to choose a class takes all that is left of it.
        """
        places = np.maximum(totals // quota, 1)
        chosen = self.choose_labels(places, np.ones(len(totals)), rng).T
        counts = chosen * quota
        for row, clients, total, count in zip(counts, chosen, totals, places, strict=True):
            if clients.sum() == count:
                row[np.flatnonzero(clients)[-1]] = total - quota * (count - 1)
        return counts

    def balanced_counts(self, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """How many samples of each class every client gets, int64 [classes, N], where all samples are assigned."""
        places = self.places(totals)
        chosen = self.choose_labels(places, places.astype(float), rng)[rng.permutation(self.clients)].T
        counts = np.zeros(chosen.shape, dtype=np.int64)
        for row, clients, total, count in zip(counts, chosen, totals, places, strict=True):
            row[clients] = np.diff(np.arange(count + 1) * total // count)
        return counts

    def places(self, totals: np.ndarray) -> np.ndarray:
        """The number of places of each class, that is of clients that hold it, int64; N·N_c in all."""
        most, wanted = np.minimum(totals, self.clients), self.clients * self.labels
        if len(totals) > wanted or most.sum() < wanted:
            raise DataError(
                f"{self.clients:,} clients of {self.labels} labels need {len(totals):,} to {most.sum():,} places for "
                f"these classes, got {wanted:,}; change partition.labels or partition.clients, "
                "or leave partition.balanced out."
            )
        taken = np.arange(1, most.max())
        # Samples a place, if the class has so many places already: the next place goes where they are most.
        per_place = np.where(taken < most[:, None], totals[:, None] / taken, 0)
        more = np.argsort(-per_place, axis=None, kind="stable")[: wanted - len(totals)]
        return 1 + np.bincount(more // max(1, len(taken)), minlength=len(totals))

    def choose_labels(self, places: np.ndarray, odds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Which classes every client holds, bool [N, classes]; a class with more `odds` is chosen more often.

        Choices are independent until a class has no place left or, if balanced, one for everybody that follows: they
        are made in blocks, and those after such a moment are made again.
        """
        held, left, at = np.zeros((self.clients, len(places)), dtype=bool), places.copy(), 0
        while at < self.clients and left.any():
            block = held[at : at + max(1, CELLS // len(places))]
            follow = self.clients - at - np.arange(len(block) + 1)[:, None]  # clients to choose, before and after each
            must = self.balanced & (left == follow[0])
            keys = np.where(must, -1, np.where(left, rng.standard_exponential(block.shape) / odds, np.inf))
            chosen = np.zeros(block.shape, dtype=bool)
            np.put_along_axis(chosen, np.argpartition(keys, self.labels - 1, axis=1)[:, : self.labels], True, axis=1)
            chosen &= left > 0
            after = left - chosen.cumsum(0)
            changed = (left > 0) & (after == 0) | self.balanced & ~must & (after == follow[1:])
            valid = 1 + int(np.argmax(np.append(changed.any(1)[:-1], True)))
            block[:valid] = chosen[:valid]
            left = after[valid - 1]
            at += valid
        return held


class Shards(Partition):
    """Sort by label, cut into N·`shards` shards whose sizes differ by at most one, deal them at random.

    From McMahan et al., AISTATS 2017.
    """

    idea: ClassVar[str] = "samples sorted by label and cut into shards, a few of them to each client"
    shards: int = setting("shards of a client", default=2, least=1)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        n, totals, pieces = len(labels), class_sizes(labels, "shards"), self.clients * self.shards
        if n < pieces:
            raise DataError(
                f"{n:,} samples cannot be cut into {self.clients:,} × partition.shards = {self.shards} shards; "
                "lower partition.shards or partition.clients."
            )
        rng = generator(seed, "partition")
        sizes = np.diff(np.arange(pieces + 1) * n // pieces)
        holder = np.empty(n, dtype=np.int64)
        holder[shuffle_within_classes(labels, totals, rng)] = np.repeat(rng.permutation(pieces) // self.shards, sizes)
        return group_by_owner(holder, self.clients)


class Natural(Partition):
    """Every sample stays with the client it came from."""

    idea: ClassVar[str] = "as the data come: every sample stays with its natural client"

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        if owner is None:
            raise DataError(
                "the natural partition: this dataset does not come divided among clients; "
                'set partition.name to "iid" or "dirichlet".'
            )
        if len(owner) != len(labels) or int(owner.min()) < 0:
            raise DataError(
                f"the owners must be one client number from 0 for each of the {len(labels)} samples, "
                f"got {len(owner)} from {int(owner.min())}; number the clients 0, 1, 2, …"
            )
        if int(owner.max()) >= self.clients:
            raise DataError(
                f"the data belong to {int(owner.max()) + 1} clients, more than partition.clients = {self.clients}; "
                f"set partition.clients = {int(owner.max()) + 1}."
            )
        return group_by_owner(owner, self.clients)
