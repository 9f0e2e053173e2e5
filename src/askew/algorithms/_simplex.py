"""The shortest vector in the convex hull of m vectors, from their Gram matrix alone."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def min_norm_point(gram: Array, rounds: int = 10_000) -> Array:
    """Wolfe's method: exact in finitely many steps. Returns the weights α ≥ 0, Σ α = 1, of the shortest Σ α_i u_i.

    The active points, which are affinely independent, have weights; the others have none. If the shortest affine
    combination of the active points lies in their hull, the point that improves most becomes active. If it lies
    outside, the first active point to reach weight zero leaves.
    """
    gram = np.asarray(gram, dtype=np.float64)
    m = len(gram)
    scale = max(float(np.abs(np.diag(gram)).max()), 1e-300)
    active, alpha = [int(np.diag(gram).argmin())], np.ones(1)
    for _ in range(rounds):
        products = gram[:, active] @ alpha  # ⟨u_i, u⟩
        best = int(products.argmin())
        if best in active or products[best] > alpha @ products[active] - 1e-14 * scale:
            break
        active, alpha = [*active, best], np.append(alpha, 0.0)
        while True:
            affine = affine_minimiser(gram[np.ix_(active, active)])
            if affine.min() > 1e-14:
                alpha = affine
                break
            leaving = affine < alpha
            step = np.min(
                alpha[leaving & (affine <= 1e-14)] / (alpha - affine)[leaving & (affine <= 1e-14)], initial=1.0
            )
            alpha = (1 - step) * alpha + step * affine
            keep = alpha > 1e-14
            active, alpha = [c for c, k in zip(active, keep, strict=True) if k], alpha[keep] / alpha[keep].sum()
            if len(active) == 1:
                break
    weights = np.zeros(m)
    weights[active] = alpha / alpha.sum()
    return weights


def affine_minimiser(gram: Array) -> Array:
    """Weights summing to 1 (of any sign) of the shortest affine combination; least squares where the points are
    dependent.
    """
    m = len(gram)
    system = np.block([[gram, np.ones((m, 1))], [np.ones((1, m)), np.zeros((1, 1))]])
    solution = np.linalg.lstsq(system, np.append(np.zeros(m), 1.0), rcond=1e-13)[0]
    weights = solution[:m]
    return np.asarray(weights / weights.sum())


def slsqp(gram: Array, low: Array | None = None, high: Array | None = None, start: Array | None = None) -> Array:
    """The same by sequential quadratic programming, with optional bounds on the weights."""
    from scipy.optimize import minimize

    m = len(gram)
    gram = np.asarray(gram, dtype=np.float64)
    scale = max(float(np.abs(np.diag(gram)).max()), 1e-300)
    low = np.zeros(m) if low is None else low
    high = np.ones(m) if high is None else high
    result = minimize(
        lambda a: a @ gram @ a / scale,
        np.full(m, 1 / m) if start is None else start,
        jac=lambda a: 2 * gram @ a / scale,
        bounds=list(zip(low, high, strict=True)),
        constraints=[{"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)}],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    weights = np.clip(result.x, low, high)
    return np.asarray(weights / weights.sum())
