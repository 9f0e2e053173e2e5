"""Views: chance that belongs to an address, pixels that move whole, windows of a text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from askew.data.view import PixelTransform, TextWindows, drawn, marks

CPU = torch.device("cpu")
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
PLAIN = PixelTransform(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
WHERE = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)  # every pixel says where it is


def seen(view: PixelTransform, use: torch.Tensor, image: torch.Tensor = WHERE) -> torch.Tensor:
    """The bytes that a view shows, [n, h, w]."""
    x = view(image.expand(len(use), -1, -1, -1), torch.float64, use)
    return (x * 255).round().long()[:, 0]


def test_marks_belong_to_their_address() -> None:
    base = marks(1, 100, 2, 3)
    assert torch.equal(base[:40], marks(1, 40, 2, 3)) and len(base.unique()) == 100
    for other in (marks(0, 100, 2, 3), marks(1, 100, 1, 3), marks(1, 100, 2, 4)):
        assert not set(base.tolist()) & set(other.tolist())


@pytest.mark.parametrize("below", [2, 3, 9, 61])
def test_draws_are_uniform_and_independent(below: int) -> None:
    n = 60_000
    use = marks(0, n)
    for which in range(5):
        counts = torch.bincount(drawn(use, which, below), minlength=below)
        assert len(counts) == below
        assert (counts - n / below).square().sum() / (n / below) < below - 1 + 5 * (
            2 * (below - 1)
        ) ** 0.5  # chi-squared
    first, second = (drawn(use, which).double() for which in (0, 1))
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / n**0.5


def test_draws_stay_below_at_the_very_top() -> None:
    use = marks(3, 2_000_000)
    assert int(drawn(use, 0, 9).max()) == 8 and int(drawn(use, 0).max()) < 1 << 24


def test_pixels_are_normalised() -> None:
    x = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    expected = (x.double() / 255 - MEAN.double()) / STD.double()
    assert torch.allclose(PixelTransform(MEAN.double(), STD.double())(x, torch.float64), expected, atol=1e-14)
    assert PixelTransform(MEAN, STD)(x, torch.float32).dtype == torch.float32


def test_without_marks_the_middle_is_seen() -> None:
    view = PixelTransform(PLAIN.mean, PLAIN.std, crop=4, flip=True)
    x = view(WHERE, torch.float64)
    assert view.shape((1, 8, 8)) == (1, 4, 4) and ((x * 255).round().long() == WHERE[:, :, 2:6, 2:6]).all()


def test_every_cut_is_a_piece_of_the_image_and_all_are_equally_likely() -> None:
    use = marks(0, 20_000)
    got = seen(PixelTransform(PLAIN.mean, PLAIN.std, crop=6), use)
    corner = got[:, 0, 0]
    top, left = corner // 8, corner % 8
    assert set(top.tolist()) == set(left.tolist()) == {0, 1, 2}
    expected = WHERE[0, 0].long().unfold(0, 6, 1).unfold(1, 6, 1)
    assert torch.equal(got, expected[top, left])
    counts = torch.bincount(top * 3 + left).double()
    assert (counts / 20_000 - 1 / 9).abs().max() < 5 * (1 / 9 * 8 / 9 / 20_000) ** 0.5


def test_half_of_the_images_are_mirrored() -> None:
    got = seen(PixelTransform(PLAIN.mean, PLAIN.std, flip=True), marks(0, 10_000))
    mirrored = (got == WHERE[0, 0].long().flip(1)).flatten(1).all(1)
    assert ((got == WHERE[0, 0].long()).flatten(1).all(1) ^ mirrored).all()
    assert abs(mirrored.double().mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize("fill", ["black", "mean", "reflect"])
def test_padding_is_as_numpy_pads(fill: str) -> None:
    image = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    view = PixelTransform(MEAN.double(), STD.double(), pad=3, fill=fill)
    use = marks(5, 300)
    got = view(image.expand(300, -1, -1, -1), torch.float64, use)
    normal = (image[0].double() / 255 - view.mean) / view.std
    wide = {
        "black": (np.pad(image[0].numpy(), ((0, 0), (3, 3), (3, 3))) / 255 - view.mean.numpy()) / view.std.numpy(),
        "mean": np.pad(normal.numpy(), ((0, 0), (3, 3), (3, 3))),
        "reflect": np.pad(normal.numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect"),
    }[fill]
    pieces = torch.from_numpy(wide).unfold(1, 8, 1).unfold(2, 8, 1)
    at = drawn(use, 0, 7), drawn(use, 1, 7)
    assert len(set(zip(*(a.tolist() for a in at), strict=True))) == 49
    assert torch.allclose(got, pieces[:, at[0], at[1]].transpose(0, 1), atol=1e-12)


def test_only_some_are_cut_at_random_if_so_asked() -> None:
    got = seen(PixelTransform(PLAIN.mean, PLAIN.std, pad=2, fill="reflect", chance=0.5), marks(0, 10_000))
    whole = (got == WHERE[0, 0].long()).flatten(1).all(1).double().mean()
    chance = 0.5 + 0.5 / 25
    assert abs(whole - chance) < 5 * (chance * (1 - chance) / 10_000) ** 0.5


def test_turning_moves_pixels_round_the_middle() -> None:
    use = marks(0, 4000)
    view = PixelTransform(PLAIN.mean, PLAIN.std, turn=180.0)
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 4], image[0, 0, 4, 7] = 200, 100  # the middle and a point three to the right
    got = seen(view, use, image)
    assert (got[:, 4, 4] == 200).all()
    angle = (drawn(use, 4).double() / 2**23 - 1) * torch.pi
    assert angle.min() < -3.1 and angle.max() > 3.1
    for k, degrees in ((0, 0.0), (1, 90.0), (2, -90.0)):
        near = (angle * 180 / torch.pi - degrees).abs() < 3
        assert int(near.sum()) > 50
        # As seen, what was to the right is now turned by the angle, counted as the look-up turns it back.
        row, column = ((4, 7), (7, 4), (1, 4))[k]
        assert (got[near, row, column] == 100).all() or (got[near, 8 - row, column] == 100).all()


def test_a_small_turn_leaves_black_corners_only() -> None:
    view = PixelTransform(PLAIN.mean, PLAIN.std, turn=15.0)
    full = torch.full((1, 1, 32, 32), 255, dtype=torch.uint8)
    got = seen(view, marks(0, 500), full)
    assert (got[:, 8:24, 8:24] == 255).all() and (got == 0).any() and set(got.unique().tolist()) == {0, 255}


def test_cut_once_for_all_is_what_the_view_shows() -> None:
    view = PixelTransform(MEAN, STD, crop=6, pad=2, flip=True, turn=20.0)
    x, use = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8), marks(0, 50)
    assert torch.equal(PixelTransform(MEAN, STD)(view.cut(x, use), torch.float32), view(x, torch.float32, use))


def test_any_shape_of_batch() -> None:
    view = PixelTransform(MEAN, STD, pad=2, flip=True, fill="mean")
    x, use = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8), marks(0, 6)
    both = view(x.view(2, 3, 3, 8, 8), torch.float32, use.view(2, 3))
    assert torch.equal(both.view(6, 3, 8, 8), view(x, torch.float32, use))


def test_windows_of_a_text() -> None:
    text = torch.randint(0, 80, (100,), dtype=torch.uint8)
    view = TextWindows(text, 10).to(CPU)
    x = torch.tensor([[0, 5], [90, 17]])
    got = view(x, torch.float32)
    assert view.shape(()) == (10,) and got.shape == (2, 2, 10) and got.dtype == torch.int64
    assert got[1, 0].tolist() == text[90:100].tolist()
