"""Skew: its measures in closed form, its picture, and inputs that shift from client to client."""

from __future__ import annotations

import math
from io import BytesIO, StringIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rich.console import Console

import askew
from askew.data import partition, shift
from askew.data.shift import shift_inputs
from askew.data.skew import heterogeneity
from askew.errors import DataError
from askew.report import skew

# --- measures


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_clients_that_are_alike_have_no_skew(classes: int) -> None:
    counts = np.arange(1, classes + 1)
    measures = heterogeneity(np.outer([1, 3, 2, 3], counts))  # sizes differ, distributions do not
    assert max(measures[name] for name in ("tv_mean", "tv_max", "js_mean", "js_max")) == pytest.approx(0, abs=1e-12)
    p = counts / counts.sum()
    assert [measures["effective_classes_mean"], measures["effective_classes_min"]] == pytest.approx(
        [math.exp(-(p * np.log(p)).sum())] * 2
    )
    assert measures["classes_mean"] == classes


@pytest.mark.parametrize("classes", [2, 5, 100])
def test_one_class_a_client_is_the_other_end(classes: int) -> None:
    measures = heterogeneity(7 * np.eye(classes, dtype=np.int64))
    assert [measures["tv_mean"], measures["tv_max"]] == pytest.approx([1 - 1 / classes] * 2)
    # The midpoint has mass (1 + 1/K)/2 on the client's class and 1/(2K) on each other one.
    high, low = (1 + 1 / classes) / 2, 1 / (2 * classes)
    middle = -high * math.log2(high) - (classes - 1) * low * math.log2(low)
    assert [measures["js_mean"], measures["js_max"]] == pytest.approx([middle - math.log2(classes) / 2] * 2)
    assert [measures["effective_classes_mean"], measures["effective_classes_min"]] == pytest.approx([1, 1])
    assert measures["classes_mean"] == 1


def test_measures_of_three_clients() -> None:
    measures = heterogeneity(np.array([[2, 2, 0, 0], [0, 0, 0, 0], [4, 4, 4, 4], [0, 0, 0, 10]]))
    assert measures["clients"] == 4 and measures["clients_with_samples"] == 3 and measures["samples"] == 30
    assert (measures["size_min"], measures["size_median"], measures["size_mean"], measures["size_max"]) == (
        4,
        10,
        10,
        16,
    )
    assert measures["size_cv"] == pytest.approx(math.sqrt(24) / 10)
    # All together: 6, 6, 4 and 14 of 30.
    tv = [18 / 30, 13 / 60, 16 / 30]
    assert measures["tv_mean"] == pytest.approx(sum(tv) / 3) and measures["tv_max"] == pytest.approx(max(tv))
    assert measures["effective_classes_mean"] == pytest.approx((2 + 4 + 1) / 3)
    assert measures["effective_classes_min"] == pytest.approx(1)
    assert measures["classes_mean"] == pytest.approx(7 / 3)


@given(counts=arrays.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 50)))
@settings(max_examples=80, deadline=None)
def test_measures_stay_within_their_bounds(counts: np.ndarray) -> None:
    if not counts.sum():
        with pytest.raises(DataError, match="no client holds a sample"):
            heterogeneity(counts)
        return
    measures = heterogeneity(counts)
    ascending = [
        (0, measures["tv_mean"], measures["tv_max"], 1),
        (
            0,
            measures["js_mean"],
            measures["js_max"],
            measures["tv_max"],
        ),  # in bits the divergence never exceeds the distance
        (
            1,
            measures["effective_classes_min"],
            measures["effective_classes_mean"],
            measures["classes_mean"],
            counts.shape[1],
        ),
    ]
    assert all(a <= b + 1e-12 for chain in ascending for a, b in pairwise(chain))
    assert (
        measures["size_min"] <= measures["size_median"] <= measures["size_max"] and measures["samples"] == counts.sum()
    )
    doubled = heterogeneity(np.concatenate([counts, counts]))
    assert all(
        doubled[name] == pytest.approx(measures[name], abs=1e-12)
        for name in measures
        if name.startswith(("tv", "js", "size", "effective"))
    )


def test_skew_falls_as_alpha_grows() -> None:
    labels = np.arange(20_000) % 10
    for rule in (partition.Dirichlet, partition.DirichletPrior):
        measures = [
            heterogeneity(rule(clients=50, alpha=a).split(labels, 0).histogram(labels, 10)) for a in (0.1, 1.0, 100.0)
        ]
        assert measures[0]["js_mean"] > 2 * measures[1]["js_mean"] > 4 * measures[2]["js_mean"]
        assert (
            measures[0]["effective_classes_mean"]
            < measures[1]["effective_classes_mean"]
            < measures[2]["effective_classes_mean"]
        )


# --- pictures


@pytest.mark.parametrize(
    ("clients", "classes"),
    [
        (10, 10),
        (1000, 10),
        (3, 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((100, 100), (600, 80), (700, 0))),
    ],
)
def test_the_picture_shows_every_client_or_says_which(clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).poisson(3, (clients, classes))
    figure = skew.draw_skew(counts, counts.sum(1) if classes else np.arange(clients), "by class")
    strip, panel = figure.axes[0], figure.axes[1 if classes else 0]
    assert strip.get_title(loc="left") == "by class" and len(strip.patches) == min(clients, 500)
    order = "their most frequent class" if classes else "size"
    assert panel.get_xlabel() == (
        "Client" if clients <= 100 else f"500 of {clients:,} clients, ordered by {order}, at even steps"
    )
    if classes:
        shown = panel.collections[0].get_array().reshape(classes, -1)
        assert shown.shape[1] == len(strip.patches)
        assert np.array_equal(shown.sum(0), [bar.get_height() for bar in strip.patches])
        if clients > 100:
            assert (np.diff(shown.argmax(0)) >= 0).all() and len(set(shown.argmax(0))) > 0.9 * classes
        else:
            assert np.array_equal(shown.T, counts)
    figure.savefig(BytesIO())


def test_one_huge_client_does_not_hide_the_others() -> None:
    counts = np.full((60, 5), 4)
    counts[0] = 1000
    figure = skew.draw_skew(counts, counts.sum(1), "")
    assert figure.axes[0].get_ylim()[1] == pytest.approx(24) and figure.axes[1].collections[0].get_clim() == (0, 4)
    assert figure.axes[0].texts[0].get_text() == "5,000"
    even = skew.draw_skew(counts[1:], counts[1:].sum(1), "")
    assert not even.axes[0].texts and even.axes[1].collections[0].get_clim() == (0, 4)


def test_the_summary_holds_the_measures() -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(skew.skew_table(heterogeneity(np.array([[1500, 0], [0, 500], [0, 0]]))))
    page = console.export_text()
    for part in (
        "3, 1 of them without samples",
        "2,000",
        "500 to 1,500, median 1,000, mean 1,000.0",
        "0.500",
        "mean 1.00",
        "mean 0.500, largest 0.750",
    ):
        assert part in page


def test_of_a_regression_only_sizes_are_measured() -> None:
    x = np.arange(60.0)[:, None]
    described = askew.describe((x, x[:, 0] / 7), clients=4)
    assert not {"tv_mean", "js_mean", "classes_mean", "effective_classes_mean"} & described.summary()["skew"].keys()
    assert "variation of sizes" in str(described) and "classes of a client" not in str(described)


# --- shifts


def image(count: int, side: int = 6) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("turns", [-1, 1, 2, 3])
@pytest.mark.parametrize("side", [5, 8])
def test_right_angles_are_exact_rotations(turns: int, side: int) -> None:
    x = image(4, side)
    client = np.array([0, 4, 2, -1])
    shifted = shift_inputs(x, client, 5, 0.0, 180.0 * turns, 0)
    assert torch.equal(shifted[0], x[0]) and torch.equal(shifted[3], x[3])
    assert torch.allclose(shifted[1], torch.rot90(x[1], 2 * turns, (-2, -1)), atol=1e-5)
    assert torch.allclose(shifted[2], torch.rot90(x[2], turns, (-2, -1)), atol=1e-5)
    pixels = (x * 255).byte()
    assert torch.equal(
        shift_inputs(pixels, client, 5, 0.0, 180.0 * turns, 0)[2], torch.rot90(pixels[2], turns, (-2, -1))
    )


def test_oblong_images_rotate_about_their_centre_and_keep_their_scale() -> None:
    x = torch.zeros(2, 1, 5, 9)
    x[1, 0, 2, 6] = 1.0  # two to the right of the centre: a quarter turn puts it two above
    expected = torch.zeros(5, 9)
    expected[0, 4] = 1.0
    assert torch.allclose(shift_inputs(x, np.array([0, 1]), 2, 0.0, 90.0, 0)[1, 0], expected, atol=1e-5)
    half = shift_inputs(torch.ones(2, 1, 5, 9), np.array([0, 1]), 2, 0.0, 45.0, 0)[1, 0]
    assert half[2, 4] == pytest.approx(1) and half[0, 0] == 0  # zeros come in from outside


def test_noise_grows_from_client_to_client_in_units_of_the_range() -> None:
    clients, each, noise = 5, 40, 0.2
    client = np.arange(clients * each) % clients
    for x, full in (
        (torch.zeros(len(client), 400), 1.0),
        (torch.full((len(client), 400), 128, dtype=torch.uint8), 255.0),
    ):
        shifted = shift_inputs(x, client, clients, noise, 0.0, 0)
        assert shifted.dtype == x.dtype and shifted.shape == x.shape
        assert torch.equal(shifted[client == 0], x[client == 0])
        for i in range(1, clients):
            added = (shifted[client == i].double() - x[client == i].double()) / full
            level, count = noise * i / (clients - 1), added.numel()
            # Rounding adds 1/12 of a step squared to the variance; clipping beyond 2.5 deviations takes little from it.
            slack = 0.0 if full == 1 else 0.02
            assert abs(added.std() / level - 1) < 5 / math.sqrt(2 * count) + slack
            assert abs(added.mean()) < 5 * level / math.sqrt(count) + slack / 100


def test_bytes_are_clipped_not_wrapped() -> None:
    x = torch.tensor([[0, 255]] * 500, dtype=torch.uint8).repeat(2, 1)
    shifted = shift_inputs(x, np.repeat([0, 1], 500), 2, 0.05, 0.0, 0)[500:].int()
    assert (
        (shifted[:, 0] < 100).all()
        and (shifted[:, 1] > 155).all()
        and (shifted[:, 0] == 0).any()
        and (shifted[:, 1] == 255).any()
    )


@pytest.mark.parametrize("cells", [1, 500, 1 << 19])
def test_inputs_of_a_client_do_not_depend_on_the_other_clients(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, client = image(30), np.array([2, 0, 1] * 10)
    whole = shift_inputs(x, client, 3, 0.1, 30.0, 7)
    monkeypatch.setattr(shift, "CELLS", cells)
    assert torch.equal(shift_inputs(x, torch.from_numpy(client), 3, 0.1, 30.0, 7), whole)
    alone = shift_inputs(x[client == 2], np.full(10, 2), 3, 0.1, 30.0, 7)
    assert torch.equal(alone, whole[client == 2])
    assert torch.equal(shift_inputs(x[client == 2][:4], np.full(4, 2), 3, 0.1, 30.0, 7), alone[:4])
    assert not torch.equal(shift_inputs(x, client, 3, 0.1, 30.0, 8), whole)
    noise = shift_inputs(torch.zeros_like(x), client, 3, 0.1, 0.0, 7)
    assert not torch.allclose(2 * noise[client == 1], noise[client == 2])  # clients have noise of their added


def test_without_a_shift_inputs_are_returned_as_they_are() -> None:
    x, tokens = image(4), torch.zeros(4, 9, dtype=torch.int64)
    before = x.clone()
    assert (
        shift_inputs(x, np.arange(4), 4, 0.0, 0.0, 0) is x
        and shift_inputs(tokens, np.arange(4), 4, 0.0, 0.0, 0) is tokens
    )
    assert torch.equal(shift_inputs(x, np.zeros(4, dtype=int), 1, 0.5, 90.0, 0), x)
    shift_inputs(x, np.arange(4), 4, 0.5, 90.0, 0)
    assert torch.equal(x, before)
    assert shift_inputs(x.double(), np.arange(4), 4, 0.5, 9.0, 0).dtype == torch.float64
    assert shift_inputs(x.half(), np.arange(4), 4, 0.5, 9.0, 0).dtype == torch.float16


@pytest.mark.parametrize(("noise", "rotation"), [(0.1, 0.0), (0.0, 10.0)])
def test_tokens_are_refused(noise: float, rotation: float) -> None:
    with pytest.raises(
        DataError, match=r"need real inputs or bytes, got torch.int64; set partition.noise and partition.rotation to 0"
    ):
        shift_inputs(torch.zeros(4, 1, 3, 3, dtype=torch.int64), np.arange(4), 4, noise, rotation, 0)


def test_only_images_rotate() -> None:
    with pytest.raises(
        DataError, match=r"rotation needs images \[channels, height, width\], got inputs of shape \[9\]; set"
    ):
        shift_inputs(torch.zeros(4, 9), np.arange(4), 4, 0.0, 10.0, 0)
    assert shift_inputs(torch.zeros(4, 9), np.arange(4), 4, 1.0, 0.0, 0)[1:].abs().min() > 0
