"""Robust aggregation: the table [robust] of a configuration, and its rule between the clients' uploads and the method.

It limits what a few wrong or hostile clients can do to the server's step; `robust_rules.py` has the rules.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.text import count_text
from ..errors import ConfigError
from .answers import leave_out_not_finite
from .base import Incident, PhaseOutputs, PhaseRequest
from .robust_rules import (
    ROUNDING,
    Uploads,
    cap_weights,
    geometric_median,
    least_for_krum,
    mean_of_groups,
    multi_krum,
    trimmed_mean,
    typical_length,
    weighted_median,
)


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
        groups, bad = math.ceil(count / max(1, self.bucket)), self.bad_count(count)
        if self.rule == "krum" and groups < least_for_krum(bad):
            of = f" in {count_text(groups, 'group')}" if self.bucket > 1 else ""
            raise ConfigError(
                f"robust: krum with {count_text(bad, 'bad client')} needs at least {least_for_krum(bad)} uploads "
                f"(2f + 3), and a round has {count_text(count, 'participant')}{of}; "
                "lower robust.bad or robust.bucket, or take more participants."
            )

    def bad_count(self, count: int) -> int:
        """f: how many of so many participants are assumed to be bad."""
        return math.ceil(self.bad * count - ROUNDING)


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


def without_broken_rows(request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
    """The outputs without those that are not finite: one of them would spoil a sort or a distance."""
    models = [] if outputs.theta is None else [outputs.theta]
    reports = [outputs.loss, *outputs.up.values(), *outputs.state.values(), *models, outputs.buffers]
    return leave_out_not_finite(outputs, request.plan.ids, reports)


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
