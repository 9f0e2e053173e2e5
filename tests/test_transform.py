"""Input transforms: draws that belong to a use of a sample, pixels that move whole, windows of a text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from askew.data.transform import PixelTransform, TextWindows, random_below, sample_draws

CPU = torch.device("cpu")
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
PLAIN = PixelTransform(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
WHERE = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)  # every pixel says where it is


def output_bytes(transform: PixelTransform, draws: torch.Tensor, image: torch.Tensor = WHERE) -> torch.Tensor:
    """The bytes that a transform makes of one image for each draw, [n, h, w]."""
    x = transform(image.expand(len(draws), -1, -1, -1), torch.float64, draws)
    return (x * 255).round().long()[:, 0]


def test_draws_belong_to_their_seed_round_client_and_use() -> None:
    base = sample_draws(1, 100, 2, 3)
    assert torch.equal(base[:40], sample_draws(1, 40, 2, 3)) and len(base.unique()) == 100
    for other in (sample_draws(0, 100, 2, 3), sample_draws(1, 100, 1, 3), sample_draws(1, 100, 2, 4)):
        assert not set(base.tolist()) & set(other.tolist())


@pytest.mark.parametrize("below", [2, 3, 9, 61])
def test_draws_are_uniform_and_independent(below: int) -> None:
    n, limit = 60_000, below - 1 + 5 * (2 * (below - 1)) ** 0.5  # five standard deviations of chi-squared
    draws = sample_draws(0, n)
    for which in range(5):
        counts = torch.bincount(random_below(draws, which, below), minlength=below)
        assert len(counts) == below
        assert (counts - n / below).square().sum() / (n / below) < limit
    first, second = (random_below(draws, which).double() for which in (0, 1))
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / n**0.5


def test_draws_stay_below_at_the_very_top() -> None:
    draws = sample_draws(3, 2_000_000)
    assert int(random_below(draws, 0, 9).max()) == 8 and int(random_below(draws, 0).max()) < 1 << 24


def test_pixels_are_normalised() -> None:
    x = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    expected = (x.double() / 255 - MEAN.double()) / STD.double()
    assert torch.allclose(PixelTransform(MEAN.double(), STD.double())(x, torch.float64), expected, atol=1e-14)
    assert PixelTransform(MEAN, STD)(x, torch.float32).dtype == torch.float32


def test_without_draws_the_middle_is_cut_out() -> None:
    transform = PixelTransform(PLAIN.mean, PLAIN.std, crop=4, flip=True)
    x = transform(WHERE, torch.float64)
    assert transform.shape((1, 8, 8)) == (1, 4, 4) and ((x * 255).round().long() == WHERE[:, :, 2:6, 2:6]).all()


def test_every_cut_is_a_piece_of_the_image_and_all_are_equally_likely() -> None:
    draws = sample_draws(0, 20_000)
    got = output_bytes(PixelTransform(PLAIN.mean, PLAIN.std, crop=6), draws)
    corner = got[:, 0, 0]
    top, left = corner // 8, corner % 8
    assert set(top.tolist()) == set(left.tolist()) == {0, 1, 2}
    expected = WHERE[0, 0].long().unfold(0, 6, 1).unfold(1, 6, 1)
    assert torch.equal(got, expected[top, left])
    counts = torch.bincount(top * 3 + left).double()
    assert (counts / 20_000 - 1 / 9).abs().max() < 5 * (1 / 9 * 8 / 9 / 20_000) ** 0.5


def test_half_of_the_images_are_mirrored() -> None:
    got = output_bytes(PixelTransform(PLAIN.mean, PLAIN.std, flip=True), sample_draws(0, 10_000))
    mirrored = (got == WHERE[0, 0].long().flip(1)).flatten(1).all(1)
    assert ((got == WHERE[0, 0].long()).flatten(1).all(1) ^ mirrored).all()
    assert abs(mirrored.double().mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize("fill", ["black", "mean", "reflect"])
def test_padding_is_as_numpy_pads(fill: str) -> None:
    image = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    transform = PixelTransform(MEAN.double(), STD.double(), pad=3, fill=fill)
    draws = sample_draws(5, 300)
    got = transform(image.expand(300, -1, -1, -1), torch.float64, draws)
    normal = (image[0].double() / 255 - transform.mean) / transform.std
    wide = {
        "black": (np.pad(image[0].numpy(), ((0, 0), (3, 3), (3, 3))) / 255 - transform.mean.numpy())
        / transform.std.numpy(),
        "mean": np.pad(normal.numpy(), ((0, 0), (3, 3), (3, 3))),
        "reflect": np.pad(normal.numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect"),
    }[fill]
    pieces = torch.from_numpy(wide).unfold(1, 8, 1).unfold(2, 8, 1)
    at = random_below(draws, 0, 7), random_below(draws, 1, 7)
    assert len(set(zip(*(a.tolist() for a in at), strict=True))) == 49
    assert torch.allclose(got, pieces[:, at[0], at[1]].transpose(0, 1), atol=1e-12)


def test_only_some_are_cut_at_random_if_so_asked() -> None:
    got = output_bytes(
        PixelTransform(PLAIN.mean, PLAIN.std, pad=2, fill="reflect", chance=0.5), sample_draws(0, 10_000)
    )
    whole = (got == WHERE[0, 0].long()).flatten(1).all(1).double().mean()
    chance = 0.5 + 0.5 / 25
    assert abs(whole - chance) < 5 * (chance * (1 - chance) / 10_000) ** 0.5


def test_rotation_moves_pixels_round_the_middle() -> None:
    draws = sample_draws(0, 4000)
    transform = PixelTransform(PLAIN.mean, PLAIN.std, turn=180.0)
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 4], image[0, 0, 4, 7] = 200, 100  # the middle and a point three to the right
    got = output_bytes(transform, draws, image)
    assert (got[:, 4, 4] == 200).all()
    angle = (random_below(draws, 4).double() / 2**23 - 1) * torch.pi
    assert angle.min() < -3.1 and angle.max() > 3.1
    for k, degrees in ((0, 0.0), (1, 90.0), (2, -90.0)):
        near = (angle * 180 / torch.pi - degrees).abs() < 3
        assert int(near.sum()) > 50
        # What was to the right is rotated by the angle; its sign is that of the look-up, which rotates back.
        row, column = ((4, 7), (7, 4), (1, 4))[k]
        assert (got[near, row, column] == 100).all() or (got[near, 8 - row, column] == 100).all()


def test_a_small_rotation_leaves_black_corners_only() -> None:
    transform = PixelTransform(PLAIN.mean, PLAIN.std, turn=15.0)
    full = torch.full((1, 1, 32, 32), 255, dtype=torch.uint8)
    got = output_bytes(transform, sample_draws(0, 500), full)
    assert (got[:, 8:24, 8:24] == 255).all() and (got == 0).any() and set(got.unique().tolist()) == {0, 255}


def test_augmented_bytes_are_those_that_become_inputs() -> None:
    transform = PixelTransform(MEAN, STD, crop=6, pad=2, flip=True, turn=20.0)
    x, draws = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8), sample_draws(0, 50)
    assert torch.equal(
        PixelTransform(MEAN, STD)(transform.augment(x, draws), torch.float32), transform(x, torch.float32, draws)
    )


def test_any_shape_of_batch() -> None:
    transform = PixelTransform(MEAN, STD, pad=2, flip=True, fill="mean")
    x, draws = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8), sample_draws(0, 6)
    both = transform(x.view(2, 3, 3, 8, 8), torch.float32, draws.view(2, 3))
    assert torch.equal(both.view(6, 3, 8, 8), transform(x, torch.float32, draws))


def test_windows_of_a_text() -> None:
    text = torch.randint(0, 80, (100,), dtype=torch.uint8)
    transform = TextWindows(text, 10).to(CPU)
    x = torch.tensor([[0, 5], [90, 17]])
    got = transform(x, torch.float32)
    assert transform.shape(()) == (10,) and got.shape == (2, 2, 10) and got.dtype == torch.int64
    assert got[1, 0].tolist() == text[90:100].tolist()
