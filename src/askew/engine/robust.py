"""Robust aggregation: rules that limit what a few wrong or hostile clients can do to the server's step.

A rule stands between the clients' uploads and the method. All that a client sends is one vector x_i: the entries of its
upload, and the change of its buffers (batch-norm statistics). p_i are the method's weights, by samples or equal.

    clip        x_i ← x_i · min(1, L / ‖x_i‖);  L given, or a multiple of the median length, by number or by weight,
                whichever is smaller
    median      every x_i ← the weighted median of each coordinate
    trimmed     every x_i ← the weighted mean of each coordinate, without the share `bad` of the weight at either end
    geometric   every x_i ← argmin_v Σ p_i ‖v − x_i‖,  by v ← Σ β_i x_i / Σ β_i,  β_i = p_i / max(ν, ‖v − x_i‖)
    krum        the x_i with the smallest sums of squared distances to their C − f − 2 nearest neighbours stay

With `bucket` = s the vectors are first averaged in random groups of s, and the rule sees the groups.

Clipping: Sun et al., Can You Really Backdoor Federated Learning?, 2019 (arXiv 1911.07963). Median and trimmed mean: Yin
et al., Byzantine-Robust Distributed Learning, ICML 2018 (arXiv 1803.01498). Geometric median: Pillutla, Kakade,
Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022 (arXiv 1912.13445), smoothed Weiszfeld; it starts
from the coordinates' median here. Multi-Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017 (arXiv
1703.02757). Bucketing: Karimireddy, He, Jaggi, ICLR 2022 (arXiv 2006.09365). The papers weigh clients equally, all but
the geometric median's; with equal weights the rules here are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.rng import generator
from ..core.settings import Settings, setting
from ..errors import ConfigError
from .answers import NOT_FINITE
from .base import Incident, PhaseOutputs, PhaseRequest
from .finite import finite_rows


class Rule(NamedTuple):
    """What is listed of a rule."""

    idea: str
    settings: tuple[str, ...]  # those that it reads, of `Robust`


RULES = {
    "clip": Rule("shorten updates that are longer than a limit", ("length", "multiple")),
    "median": Rule("the weighted median of each coordinate", ("cap",)),
    "trimmed": Rule("the weighted mean of each coordinate without its lowest and highest values", ("bad", "cap")),
    "geometric": Rule("the point with the smallest weighted sum of distances", ("iterations", "tolerance", "cap")),
    "krum": Rule("keep the updates that are nearest to each other (multi-Krum)", ("bad", "keep")),
}
CENTRES = ("median", "trimmed", "geometric")  # rules that put one vector in place of all
NOT_CHOSEN, TOO_FEW = "left out by multi-Krum", "too few for multi-Krum"  # reasons of incidents

ROUNDING = 1e-9  # shares of weight below it are rounding errors
SMOOTHING = 1e-6  # ν of the smoothed Weiszfeld algorithm
COLUMNS = 2**16  # coordinates that are sorted at a time
BLOCK = 2**22  # numbers of uploads that are copied at a time


class Robust(Settings):
    """A rule that limits the influence of wrong or hostile clients, applied to uploads before the server's step."""

    title = "robust"
    rule: str = setting("how uploads are made robust", default="none", choices=("none", *RULES))
    bucket: int = setting(
        "clients whose uploads are averaged at random before the rule; 0 or 1: none", default=0, least=0
    )
    bad: float = setting(
        "share of bad clients that trimmed (by weight) and krum (by number) assume", default=0.2, least=0, below=0.5
    )
    length: float = setting("largest length of an upload for clip; 0: by the median length", default=0.0, least=0)
    multiple: float = setting("multiple of the median length that clip allows", default=1.0, above=0)
    keep: int = setting("uploads that krum keeps; 0: all but the bad ones it assumes", default=0, least=0)
    iterations: int = setting("steps of the geometric median at most", default=100, least=1)
    tolerance: float = setting("relative change at which the geometric median stops", default=1e-6, least=0)
    cap: float = setting(
        "largest share of the weight that a client has in median, trimmed and geometric", default=1.0, above=0, most=1
    )

    def check(self) -> None:
        if self.rule == "trimmed" and self.bad * max(1, self.bucket) >= 0.5:
            raise ConfigError(
                f"robust: groups of {self.bucket} with bad = {self.bad:g} of the clients bad may be bad by half or "
                "more; lower bucket or bad."
            )
        if self.cap < 1 and self.rule not in CENTRES:
            raise ConfigError(
                f'robust: cap is for median, trimmed and geometric, got rule = "{self.rule}"; '
                'set algorithm.weighting = "uniform" instead.'
            )

    @property
    def on(self) -> bool:
        """Is anything done to uploads?"""
        return self.rule != "none" or self.bucket > 1

    def check_method(self, alg: Algorithm) -> None:
        """Refuse a rule that takes away what the method needs of its clients' uploads; raise ConfigError."""
        name = alg.display_name()
        if not self.on:
            return
        if alg.pooled or alg.combines == "nothing":
            raise ConfigError(
                f"{name} combines no uploads of clients, so there is nothing to make robust; omit [robust]."
            )
        if alg.combines == "reports":
            raise ConfigError(
                f"{name} trusts numbers that clients report beside their updates, which no rule on updates can check; "
                "use fedavg or another method with [robust]."
            )
        if alg.combines == "directions" and self.rule == "clip":
            raise ConfigError(f'{name} gives all updates the same length, so clip has no effect; use rule = "krum".')
        if alg.combines == "models" and self.rule == "clip":
            raise ConfigError(
                f"{name}: its clients send models and not updates, which clip would make shorter; "
                'use rule = "median" or "krum".'
            )
        if self.rule in CENTRES and alg.combines in ("rows", "directions"):
            raise ConfigError(
                f'{name} compares the clients\' updates, and rule = "{self.rule}" makes them all equal; '
                'use rule = "krum", or bucket.'
            )
        keeps_rows = type(alg).memory is not Algorithm.memory
        if keeps_rows and (self.rule in CENTRES or self.bucket > 1):
            what = f'rule = "{self.rule}"' if self.rule in CENTRES else "bucket"
            raise ConfigError(
                f"{name} stores something of every client at the server, and {what} mixes the clients' updates; "
                'use rule = "clip" or "krum" without bucket.'
            )

    def check_cohort(self, count: int) -> None:
        """Refuse a usual number of participants that is too small for the rule; raise ConfigError."""
        groups = math.ceil(count / max(1, self.bucket))
        if self.rule == "krum" and groups < least_for_krum(self.bad_count(count)):
            of = f" in {groups} groups" if self.bucket > 1 else ""
            raise ConfigError(
                f"robust: krum with {self.bad_count(count)} bad clients needs at least "
                f"{least_for_krum(self.bad_count(count))} uploads (2f + 3), and a round has {count} participants{of}; "
                "lower robust.bad or robust.bucket, or take more participants."
            )

    def bad_count(self, count: int) -> int:
        """f: how many of so many participants are assumed to be bad."""
        return math.ceil(self.bad * count - ROUNDING)


class Uploads(NamedTuple):
    """The vectors of C clients in parts, each [C, n]: together one vector x_i for each client."""

    parts: list[Tensor]

    def distances(self, centre: Sequence[Tensor]) -> Tensor:
        """‖x_i − centre‖ [C], in float64."""
        columns = [
            torch.cat([norm(rows - c) for rows in row_blocks(part)]) for part, c in zip(self.parts, centre, strict=True)
        ]
        return torch.stack(columns).square().sum(0).sqrt()

    def lengths(self) -> Tensor:
        """‖x_i‖ [C], in float64."""
        return torch.stack([norm(part).square() for part in self.parts]).sum(0).sqrt()

    def scaled(self, factors: Tensor) -> Uploads:
        """x_i · factor_i."""
        return Uploads([part * factors.to(part.dtype)[:, None] for part in self.parts])

    def repeated(self, centre: Sequence[Tensor]) -> Uploads:
        """One vector in place of every x_i."""
        return Uploads([c.to(part.dtype).expand_as(part) for part, c in zip(self.parts, centre, strict=True)])


class RobustStage:
    """Applies the rule of [robust] to the outputs of every phase."""

    def __init__(self, settings: Robust, alg: Algorithm, seed: int) -> None:
        settings.check_method(alg)
        self.settings, self.by_samples, self.seed = settings, alg.by_samples, seed

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        outputs = without_broken_rows(request, outputs)
        if not len(outputs.loss):
            return outputs
        uploads = uploads_of(request, outputs)
        if not uploads.parts:
            return outputs
        p = self.weights(request.inputs.size[outputs.cohort_rows()])
        groups = self.groups(request.inputs.round, len(p))
        if groups is not None:
            uploads, p = mean_of_groups(uploads, p, groups)
            outputs = replace_uploads(request, outputs, uploads, groups)
        if self.settings.rule == "krum":
            return self.select(request, outputs, uploads, groups)
        if self.settings.rule == "none":
            return outputs
        return replace_uploads(request, outputs, self.apply(uploads, p), groups)

    def weights(self, size: Tensor) -> Tensor:
        """The clients' weights in the rule [C], float64, sum 1: the method's, none above the cap."""
        size = size.double() if self.by_samples else torch.ones_like(size, dtype=torch.float64)
        return cap_weights(size / size.sum(), self.settings.cap)

    def groups(self, round: int, count: int) -> Tensor | None:
        """The group of each of C clients [C], drawn anew every round; None without bucketing."""
        if self.settings.bucket <= 1:
            return None
        order = generator(self.seed, "robust buckets", round).permutation(count)
        return torch.from_numpy(order) // self.settings.bucket

    def apply(self, uploads: Uploads, p: Tensor) -> Uploads:
        """The uploads after a rule that leaves nobody out."""
        s = self.settings
        if s.rule == "clip":
            lengths = uploads.lengths()
            limit = lengths.new_tensor(s.length) if s.length else s.multiple * typical_length(lengths, p)
            return uploads.scaled(torch.where(lengths > limit, limit / lengths, 1.0))
        if s.rule == "median":
            return uploads.repeated([weighted_median(part, p) for part in uploads.parts])
        if s.rule == "trimmed":
            share = s.bad * max(1, s.bucket)
            return uploads.repeated([trimmed_mean(part, p, share) for part in uploads.parts])
        return uploads.repeated(geometric_median(uploads, p, s.iterations, s.tolerance))

    def select(
        self, request: PhaseRequest, outputs: PhaseOutputs, uploads: Uploads, groups: Tensor | None
    ) -> PhaseOutputs:
        """The outputs of those that multi-Krum chooses; nobody's where there are too few to choose from."""
        ids, rows, candidates = request.plan.ids, outputs.cohort_rows(), len(uploads.parts[0])
        bad = self.settings.bad_count(len(rows))
        if candidates < least_for_krum(bad):
            return outputs.leave_out([Incident(ids[row], TOO_FEW, True) for row in rows], ids)
        chosen = {*multi_krum(uploads, bad, self.settings.keep or candidates - bad)}
        group_of = range(len(rows)) if groups is None else groups.tolist()
        gone = [ids[row] for row, group in zip(rows, group_of, strict=True) if group not in chosen]
        return outputs.leave_out([Incident(client, NOT_CHOSEN, True) for client in gone], ids) if gone else outputs


# uploads as vectors ---------------------------------------------------------------------------------------------------


def without_broken_rows(request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
    """The outputs without those that are not finite: one of them would spoil a sort or a distance."""
    ids, rows = request.plan.ids, outputs.cohort_rows()
    models = [] if outputs.theta is None else [outputs.theta]
    reports = [outputs.loss, *outputs.up.values(), *outputs.state.values(), *models, outputs.buffers]
    finite = finite_rows(reports).tolist()
    broken = [ids[row] for row, is_finite in zip(rows, finite, strict=True) if not is_finite]
    return outputs.leave_out([Incident(client, NOT_FINITE, True) for client in broken], ids) if broken else outputs


def uploads_of(request: PhaseRequest, outputs: PhaseOutputs) -> Uploads:
    """What the clients sent, as one vector each."""
    parts = [t.reshape(len(t), -1) for t in outputs.up.values() if t.is_floating_point()]
    sends_buffers = request.phase.trains and outputs.buffers.numel()
    changes = [outputs.buffers - request.sent_buffers(outputs.cohort_rows())] if sends_buffers else []
    return Uploads(parts + changes)


def replace_uploads(
    request: PhaseRequest, outputs: PhaseOutputs, uploads: Uploads, groups: Tensor | None
) -> PhaseOutputs:
    """The outputs with these vectors; with groups, a client's is that of its group."""
    parts = list(uploads.parts if groups is None else [part[groups.to(part.device)] for part in uploads.parts])
    up = {n: parts.pop(0).reshape(t.shape) if t.is_floating_point() else t for n, t in outputs.up.items()}
    buffers = request.sent_buffers(outputs.cohort_rows()) + parts.pop(0) if parts else outputs.buffers
    return outputs._replace(up=up, buffers=buffers)


def mean_of_groups(uploads: Uploads, p: Tensor, groups: Tensor) -> tuple[Uploads, Tensor]:
    """The weighted means of groups of clients, and the groups' weights: bucketing."""
    shares = p.new_zeros(int(groups.max()) + 1, len(p))
    shares[groups.to(p.device), torch.arange(len(p), device=p.device)] = p
    weights = shares.sum(1)
    shares = shares / weights[:, None]
    return Uploads([shares.to(part.dtype) @ part for part in uploads.parts]), weights


def cap_weights(p: Tensor, most: float) -> Tensor:
    """Weights of which none is above `most`, the others in proportion as before; equal ones if that cannot be."""
    if most * len(p) <= 1:
        return torch.full_like(p, 1 / len(p))
    capped = torch.zeros_like(p, dtype=torch.bool)
    while bool(((p > most + ROUNDING) & ~capped).any()):
        capped |= p > most
        p = torch.where(capped, most, p * (1 - most * int(capped.sum())) / p[~capped].sum())
    return p


# rules ----------------------------------------------------------------------------------------------------------------


def weighted_median(rows: Tensor, p: Tensor) -> Tensor:
    """The weighted median of each column: half of the weight is below it; between two values, the middle of them."""
    medians = []
    for columns in torch.split(rows, COLUMNS, 1):
        values, order = columns.sort(0)
        below = p[order].cumsum(0)
        last = len(rows) - 1
        low = (below < 0.5 - ROUNDING).sum(0, keepdim=True).clamp(max=last)
        high = (below < 0.5 + ROUNDING).sum(0, keepdim=True).clamp(max=last)
        medians.append((values.gather(0, low) / 2 + values.gather(0, high) / 2)[0])
    return torch.cat(medians) if medians else rows.new_zeros(0)


def typical_length(lengths: Tensor, p: Tensor) -> Tensor:
    """The median of the lengths by number or by weight, whichever is smaller: one honest majority is enough."""
    by_number, by_weight = (weighted_median(lengths[:, None], q) for q in (torch.full_like(p, 1 / len(p)), p))
    return torch.minimum(by_number, by_weight)[0]


def trimmed_mean(rows: Tensor, p: Tensor, share: float) -> Tensor:
    """The weighted mean of each column without `share` of the weight at either end; a value may be cut in part."""
    means = []
    for columns in torch.split(rows, COLUMNS, 1):
        values, order = columns.sort(0)
        above = p[order].cumsum(0)
        kept = above.clamp(max=1 - share) - (above - p[order]).clamp(min=share)
        kept = torch.where(kept > ROUNDING, kept, 0.0)  # a trace of a huge value would be huge
        means.append((kept * values.double()).sum(0) / kept.sum(0))
    return torch.cat(means).to(rows.dtype) if means else rows.new_zeros(0)


def geometric_median(uploads: Uploads, p: Tensor, iterations: int, tolerance: float) -> list[Tensor]:
    """The vector, in parts, with the smallest weighted sum of distances, by the smoothed Weiszfeld algorithm."""
    centre = [weighted_median(part, p).double() for part in uploads.parts]
    for _ in range(iterations):
        distances = uploads.distances(centre)
        beta = p / distances.clamp(min=SMOOTHING)
        beta = beta / beta.sum()
        new = [sum_rows(part, beta) for part in uploads.parts]
        moved = torch.stack([norm(a - b).square() for a, b in zip(new, centre, strict=True)]).sum().sqrt()
        centre = new
        if bool(moved <= tolerance * weighted_median(distances[:, None], p)[0]):
            break
    return centre


def sum_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ weight_i row_i, in float64."""
    blocks = row_blocks(rows)
    parts = torch.split(weights, len(blocks[0]))
    return torch.stack([w @ block.double() for w, block in zip(parts, blocks, strict=True)]).sum(0)


def row_blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in blocks that may be copied in float64 without much memory."""
    blocks: tuple[Tensor, ...] = torch.split(rows, max(1, BLOCK // max(1, rows.shape[1])))
    return blocks


def least_for_krum(bad: int) -> int:
    """The fewest uploads among which Krum can find `bad` bad ones: 2f + 3."""
    return 2 * bad + 3


def krum_scores(uploads: Uploads, bad: int) -> Tensor:
    """The sum of squared distances of each vector to its C − f − 2 nearest neighbours [C]."""
    count = len(uploads.parts[0])
    rows = [uploads.distances([part[i] for part in uploads.parts]).square() for i in range(count)]
    nearest = torch.stack(rows).fill_diagonal_(0).sort(1).values
    return nearest[:, 1 : count - bad - 1].sum(1)


def multi_krum(uploads: Uploads, bad: int, keep: int) -> list[int]:
    """The `keep` vectors with the smallest scores, in their order."""
    return sorted(krum_scores(uploads, bad).argsort(stable=True)[:keep].tolist())
