"""Generate images with the statistics of photographs and the edges of drawings from a seed.

The images contain 1/f noise (amplitude falls with frequency, as in natural scenes: Field, J. Opt.
Soc. Am. A 4, 1987), color gradients, shapes with hard edges, and strokes as thin as text. Sizes
vary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZES = ((240, 320), (320, 240), (333, 500), (480, 640), (512, 384), (150, 200), (97, 131),
         (600, 800), (301, 299), (270, 480))  # fmt: skip
"""Height and width of the images; the list repeats."""


def natural_image(seed: int) -> NDArray[np.uint8]:
    """Return a uint8 RGB image (height, width, 3) that depends only on the seed."""
    generator = np.random.default_rng(seed)
    height, width = SIZES[seed % len(SIZES)]
    picture = Image.fromarray(_draw_scene(generator, height, width))
    draw = ImageDraw.Draw(picture)
    for _ in range(generator.integers(3, 9)):
        _draw_shape(draw, generator, height, width)
    for _ in range(generator.integers(1, 4)):
        _draw_text(draw, generator, height, width)
    return np.array(picture)


def write_images(folder: Path, count: int) -> tuple[Path, ...]:
    """Write `count` images as PNG and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(_write_images(folder, count))


def _write_images(folder: Path, count: int) -> Iterator[Path]:
    for seed in range(count):
        path = folder / f"{seed:03d}.png"
        Image.fromarray(natural_image(seed)).save(path, compress_level=1)
        yield path


def _draw_scene(generator: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    layers = []
    for _ in range(3):
        noise = np.fft.rfft2(generator.normal(size=(height, width))) / frequency
        layer = np.fft.irfft2(noise, s=(height, width))
        layers.append(layer / layer.std())
    common_layer = layers[0]  # The channels of a photograph are correlated.
    mixed = np.stack([0.8 * common_layer + 0.5 * layer for layer in layers], axis=-1)
    base, contrast = generator.uniform(80, 170, size=3), generator.uniform(25, 60)
    return np.clip(np.rint(base + contrast * mixed), 0, 255).astype(np.uint8)


def _draw_shape(
    draw: ImageDraw.ImageDraw, generator: np.random.Generator, height: int, width: int
) -> None:
    left, top = int(generator.integers(0, width)), int(generator.integers(0, height))
    right = left + int(generator.integers(5, max(width // 2, 6)))
    bottom = top + int(generator.integers(5, max(height // 2, 6)))
    color = tuple(int(value) for value in generator.integers(0, 256, 3))
    kind = generator.integers(0, 4)
    if kind == 0:
        draw.rectangle((left, top, right, bottom), fill=color)
    elif kind == 1:
        draw.ellipse((left, top, right, bottom), fill=color, outline=(0, 0, 0))
    elif kind == 2:
        for line in range(left, right, 4):
            # A fence of thin lines aliases more than any other shape.
            draw.line((line, top, line, bottom), fill=color, width=1)
    else:
        draw.line((left, top, right, bottom), fill=color, width=int(generator.integers(1, 5)))


def _draw_text(
    draw: ImageDraw.ImageDraw, generator: np.random.Generator, height: int, width: int
) -> None:
    letters = "".join(chr(65 + int(code)) for code in generator.integers(0, 26, 18))
    position = (int(generator.integers(0, width // 2)), int(generator.integers(0, height - 12)))
    draw.text(position, letters, fill=(255, 255, 255) if generator.integers(0, 2) else (0, 0, 0))
