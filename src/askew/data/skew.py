"""Measures of how unequal the clients of a partition are, in size and in labels."""

from __future__ import annotations

import numpy as np

from ..errors import DataError


def entropy(p: np.ndarray) -> np.ndarray:
    """The entropy of distributions along the last axis, in nats."""
    return np.asarray(-(p * np.log(np.where(p > 0, p, 1))).sum(-1))


def heterogeneity(counts: np.ndarray, sizes: np.ndarray | None = None) -> dict[str, float | int]:
    """Measures of a partition from the number of samples of every client and class, [N, classes].

    Clients without samples are left out of all but the first two. Means are over clients, each counting alike;
    `size_cv` is the coefficient of variation. `tv` is the total variation distance ½ Σ|p_i − p| and `js` the
    Jensen–Shannon divergence, in bits, of a client's label distribution p_i and that of all samples p: both are 0 if
    all clients are alike, and at most 1. `effective_classes` is exp of the entropy of p_i: m if the client's labels are
    spread evenly over m classes; `classes` counts those it has any of. A regression has no columns, and only the
    `sizes` [N] of its clients are measured.
    """
    of_all_clients = counts.sum(1) if sizes is None or counts.shape[1] else sizes
    held, sizes = counts[of_all_clients > 0], of_all_clients[of_all_clients > 0]
    if not sizes.size:
        raise DataError(
            "no client holds a sample, so nothing can be said about the partition; use more data or fewer clients."
        )
    of_sizes = {
        "clients": len(counts),
        "clients_with_samples": len(sizes),
        "samples": int(sizes.sum()),
        "size_min": int(sizes.min()),
        "size_median": float(np.median(sizes)),
        "size_mean": float(sizes.mean()),
        "size_max": int(sizes.max()),
        "size_cv": float(sizes.std() / sizes.mean()),
    }
    if not counts.shape[1]:
        return of_sizes
    of_client, of_all = held / sizes[:, None], held.sum(0) / sizes.sum()
    tv = np.abs(of_client - of_all).sum(1) / 2
    js = (entropy((of_client + of_all) / 2) - (entropy(of_client) + entropy(of_all)) / 2).clip(0) / np.log(2)
    effective = np.exp(entropy(of_client))
    return of_sizes | {
        "tv_mean": float(tv.mean()),
        "tv_max": float(tv.max()),
        "js_mean": float(js.mean()),
        "js_max": float(js.max()),
        "effective_classes_mean": float(effective.mean()),
        "effective_classes_min": float(effective.min()),
        "classes_mean": float((held > 0).sum(1).mean()),
    }
