"""Crops, resizing and augmentation."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import softmoe
from softmoe.data import Transform, TransformConfig, to_tensor
from softmoe.data.augment import draw_erasing, erase, rand_augment
from softmoe.data.transforms import CROPS, inception_crop, resize

sides = st.integers(1, 400)
seeds = st.integers(0, 2**32)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _noise(seed: int, height: int, width: int) -> np.ndarray:
    return _rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(sides, sides, seeds, st.sampled_from([0.05, 0.3, 1.0]))
def test_inception_crop(height, width, seed, min_area):
    """The box lies within the image and has an allowed area and aspect, or it is the whole image."""
    top, left, h, w = inception_crop(height, width, _rng(seed), min_area)
    assert 0 <= top <= top + h <= 1 + 1e-9
    assert 0 <= left <= left + w <= 1 + 1e-9
    if (top, left, h, w) != (0, 0, 1, 1):
        rows, columns = h * height, w * width
        slack = 0.5 / min(rows, columns)  # sides were rounded to whole pixels
        assert min_area * (1 - slack) ** 2 - 1e-9 <= h * w * (1 + slack) ** 2
        assert 0.75 * (1 - slack) / (1 + slack) - 1e-9 <= columns / rows <= 4 / 3 * (1 + slack) / (1 - slack) + 1e-9


def test_inception_areas_are_even():
    """On a square, small areas come as often as the uniform draw says."""
    areas = np.array([np.prod(inception_crop(400, 400, _rng(s))[2:]) for s in range(3000)])
    assert abs((areas < 0.3).mean() - 0.25 / 0.80) < 0.05  # the largest areas seldom fit


@given(st.integers(1, 60), st.integers(1, 60), seeds, st.sampled_from(CROPS), st.booleans(), st.booleans())
def test_any_image_fits(height, width, seed, crop, train, antialias):
    """Any image of any size becomes the wanted size, finite and in [-1, 1]."""
    config = TransformConfig((12, 8), crop, rand_layers=2, erase=0.5, antialias=antialias)
    result = Transform(config, train)(_noise(seed, height, width), _rng(seed))
    assert result.shape == (3, 12, 8)
    assert result.dtype == torch.float32
    assert result.abs().max() <= 1


@given(seeds, st.sampled_from(CROPS), st.integers(1, 5))
def test_batch_equals_single(seed, crop, count):
    """A batch is transformed exactly as its images one at a time."""
    transform = Transform(TransformConfig(16, crop, rand_layers=1, erase=0.3), True)
    images = [_noise(seed + k, 16 + k, 20) for k in range(count)]
    one = [transform(image, _rng(seed + k)) for k, image in enumerate(images)]
    rngs = [_rng(seed + k) for k in range(count)]
    plans = [transform.plan(*image.shape[:2], rng) for image, rng in zip(images, rngs, strict=True)]
    together = to_tensor(transform.apply_batch(images, plans, rngs))
    assert torch.equal(together, torch.stack(one))


@given(st.integers(8, 2000), st.integers(8, 2000), seeds, st.sampled_from(CROPS), st.booleans())
def test_min_side_serves_the_crop(height, width, seed, crop, train):
    """Shrinking the image to the plan's shorter side never leaves the crop with too few pixels."""
    transform = Transform(TransformConfig((48, 64), crop), train)
    plan = transform.plan(height, width, _rng(seed))
    assert plan.min_side <= min(height, width)
    shrink = plan.min_side / min(height, width)
    if shrink < 1:
        assert plan.box[2] * height * shrink >= 48 - 1e-6
        assert plan.box[3] * width * shrink >= 64 - 1e-6


def test_pad_crop_is_a_window(picture):
    """pad_crop shows a window of the mirrored-out image, flipped or not; all 81 windows occur."""
    image = picture(1, 32, 32)
    transform = Transform(TransformConfig(32, "pad_crop"), True)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[top : top + 32, left : left + 32]
            windows[window.tobytes()] = windows[window[:, ::-1].tobytes()] = (top, left)
    plan = transform.plan(32, 32, _rng(0))
    seen = {windows[transform.apply(image, plan, _rng(s)).tobytes()] for s in range(800)}
    assert len(seen) == 81


def test_flip():
    """Half of the images are mirrored, the others untouched."""
    image = _noise(0, 4, 5)
    transform = Transform(TransformConfig((4, 5), "resize", flip=True), train=True)
    plan = transform.plan(4, 5, _rng(0))
    results = transform.apply_batch([image] * 200, [plan] * 200, [_rng(s) for s in range(200)])
    mirrored = [np.array_equal(r, image[:, ::-1]) for r in results]
    assert all(m or np.array_equal(r, image) for m, r in zip(mirrored, results, strict=True))
    assert 70 < sum(mirrored) < 130


def test_evaluation_is_central_and_fixed(picture):
    """In evaluation there is no chance: the shorter side goes to 256/224 of the size and the middle is cut out."""
    image = picture(2, 120, 200)
    transform = Transform(TransformConfig(56), False)
    result = transform(image, _rng(0))
    assert torch.equal(result, transform(image, _rng(1)))
    small = np.asarray(Image.fromarray(image).resize((107, 64), Image.Resampling.BOX))  # 64 = 56 * 256 / 224
    expected = small[4:60, 25:81]
    assert (result - to_tensor(expected)).abs().mean() * 127.5 < 2


def test_identity_when_size_is_right():
    """An image that already has the size is passed through."""
    image = _noise(3, 32, 32)
    for crop in ("resize", "pad_crop"):
        assert torch.equal(Transform(TransformConfig(32, crop), False)(image, _rng(0)), to_tensor(image))


def test_resize_without_antialias():
    """Plain bilinear sampling: exact on halving (the mean of four), cut off to whole numbers, and the loop's values."""
    image = _noise(4, 8, 12)
    halved = resize(image, (4, 6), antialias=False)
    exact = image.reshape(4, 2, 6, 2, 3).astype(float).mean((1, 3))
    assert np.array_equal(halved, np.floor(exact).astype(np.uint8))
    third = resize(image, (5, 7), antialias=False)
    for row, column in ((0, 0), (2, 3), (4, 6)):
        y, x = (row + 0.5) * 8 / 5 - 0.5, (column + 0.5) * 12 / 7 - 0.5
        y0, x0 = int(y), int(x)
        fy, fx = y - y0, x - x0
        block = image[y0 : y0 + 2, x0 : x0 + 2].astype(float)
        value = (block[0, 0] * (1 - fx) + block[0, 1] * fx) * (1 - fy) + (
            block[1, 0] * (1 - fx) + block[1, 1] * fx
        ) * fy
        assert np.abs(third[row, column] - value).max() <= 1


def test_to_tensor():
    """0 is -1, 255 is 1, channels first, for an image and for a batch."""
    image = np.zeros((2, 3, 3), dtype=np.uint8)
    image[0, 1] = (255, 0, 51)
    tensor = to_tensor(image)
    torch.testing.assert_close(tensor[:, 0, 1], torch.tensor([1.0, -1.0, -0.6]))
    assert to_tensor(np.stack([image, image])).shape == (2, 3, 2, 3)


@given(seeds, st.integers(0, 4), st.floats(0, 30))
def test_rand_augment(seed, layers, magnitude):
    """Size and type stay; the result depends on the generator alone; the input is untouched."""
    image = _noise(seed, 9, 13)
    before = image.copy()
    result = rand_augment(image, layers, magnitude, _rng(seed))
    assert result.shape == image.shape
    assert result.dtype == np.uint8
    assert np.array_equal(result, rand_augment(image, layers, magnitude, _rng(seed)))
    assert np.array_equal(image, before)
    if layers == 0:
        assert np.array_equal(result, image)


@given(seeds)
def test_random_erasing(seed):
    """With chance 1 a rectangle of at most a third changes; with chance 0 nothing."""
    images = torch.full((3, 3, 30, 40), 0.5)  # no level of a pixel
    assert draw_erasing((30, 40), 0.0, [_rng(seed)]).shape == (0, 6)
    drawn = draw_erasing((30, 40), 1.0, [_rng(seed + k) for k in range(3)])
    found = erase(images, torch.from_numpy(drawn))
    for k, top, bottom, left, right, _ in drawn.tolist():
        changed = (found[k] != 0.5).all(0)
        assert 0 < changed.float().mean() < 0.36
        assert changed[top:bottom, left:right].all()
        assert changed.sum() == (bottom - top) * (right - left)
        assert torch.equal((found[k] != 0.5).any(0), changed)
    assert (images == 0.5).all()


def test_erased_by_noise():
    """Rectangles hold each of the 256 levels about as often, no two images the same ones; an image that is not drawn
    stays as it is."""
    drawn = torch.tensor([[0, 0, 64, 0, 64, 5], [2, 0, 64, 0, 64, 900]])
    found = erase(torch.zeros(3, 3, 64, 64), drawn)
    levels = ((found + 1) * 127.5).round().int()
    assert torch.equal(to_tensor(levels.permute(0, 2, 3, 1).to(torch.uint8).numpy())[::2], found[::2])
    assert (found[1] == 0).all()
    for k in (0, 2):
        counts = torch.bincount(levels[k].flatten(), minlength=256).double()
        assert ((counts - 48).square() / 48).sum() < 350  # chi-squared of 255 degrees of freedom: 255 +- 23
    assert (levels[0] == levels[2]).float().mean() < 0.01


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"crop": "center"}, "inception, resize, central, pad_crop"),
        ({"min_area": 0.0}, "min_area"),
        ({"image_size": 0}, "image_size"),
        ({"erase": 1.5}, "erase"),
        ({"mixup": -1.0}, "mixup"),
        ({"rand_magnitude": 31.0}, "0 to 30"),
    ],
)
def test_mistakes(field, words):
    """Values out of range are named."""
    with pytest.raises(ValueError, match=words):
        TransformConfig(**field)


@pytest.mark.parametrize("size", [(24, 31), (80, 95)])
def test_evaluation_resizes_as_pillow_does(size):
    """Pillow alone gives the pixels of evaluation; training's faster kernel is one level off at most."""
    image = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    config = TransformConfig(size, "resize", flip=False)
    rng = np.random.default_rng(0)
    found = [t.apply(image, t.plan(60, 70, rng), rng) for t in (Transform(config, False), Transform(config, True))]
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_allclose(found[1].astype(int), expected, atol=1)


def test_decoding_needs_no_torch():
    """A process that turns files into pixels, as the decoders of the service do, does not load torch."""
    code = "import sys, softmoe.data.transforms; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
