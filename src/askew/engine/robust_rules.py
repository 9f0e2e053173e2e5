"""The robust rules: what each makes of the vectors that clients send.

All that a client sends is one vector x_i: the entries of its upload, and the change of its buffers (batch-norm
statistics). p_i are the method's weights, by samples or equal.

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

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algebra import norm

ROUNDING = 1e-9  # shares of weight below it are rounding errors
SMOOTHING = 1e-6  # ν of the smoothed Weiszfeld algorithm
COLUMNS = 2**16  # coordinates that are sorted at a time
BLOCK = 2**22  # numbers of uploads that are copied at a time


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
