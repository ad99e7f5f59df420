"""Draw random inputs: tables, images, bytes, series or tokens, some with a second input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.corpus import samples
from benchmarks.corpus.samples import Arrays

Kind = Literal["table", "image", "bytes", "series", "tokens"]
VOCABULARY = 60


@dataclass(frozen=True)
class Inputs:
    """The inputs of a net and its samples."""

    kind: Kind
    arrays: Arrays
    """Arrays by input name, in the order of forward's arguments; axis 0 is the sample."""
    width: int
    """Number of table columns, image channels or features, or the size of the vocabulary."""
    extra: Literal["", "mask", "category"] = ""
    """The kind of the second input, or an empty string if there is none."""


def draw(rng: np.random.Generator, count: int) -> Inputs:
    """Draw inputs with `count` samples."""
    makers = (
        _draw_table,
        _draw_table,
        _draw_image,
        _draw_image,
        _draw_bytes,
        _draw_series,
        _draw_tokens,
        _draw_tokens,
    )
    return makers[rng.integers(len(makers))](rng, count)


def _draw_table(rng: np.random.Generator, count: int) -> Inputs:
    """Draw a table whose columns have different units: counts, ratios, amounts of money."""
    columns = int(rng.integers(3, 24))
    values = rng.normal(0.0, 1.0, (count, columns))
    values += values @ rng.normal(0.0, 0.5, (columns, columns)) / np.sqrt(columns)
    units = 10.0 ** rng.uniform(-3.0, 5.0, columns) if rng.random() < 0.5 else np.ones(columns)
    offsets = rng.normal(0.0, 2.0, columns) * (rng.random(columns) < 0.3)
    is_integer = rng.random(columns) < 0.15
    values = np.where(is_integer, np.rint(3.0 * np.abs(values)), (values + offsets) * units)
    arrays: Arrays = {"table": values.astype(np.float32)}
    if rng.random() < 0.4:
        arrays["category"] = rng.integers(0, VOCABULARY, count).astype(np.int64)
        return Inputs("table", arrays, columns, "category")
    return Inputs("table", arrays, columns)


def _draw_image(rng: np.random.Generator, count: int) -> Inputs:
    size, seed = int(rng.choice([8, 9, 12, 16])), int(rng.integers(1 << 30))
    draw_images: Callable[..., np.ndarray] = (
        samples.normalized if rng.random() < 0.6 else samples.images
    )
    values = draw_images(count, size, seed=seed)
    if draw_images is samples.images and rng.random() < 0.5:
        values = values * np.float32(255.0)
    return Inputs("image", {"image": values}, 3)


def _draw_bytes(rng: np.random.Generator, count: int) -> Inputs:
    values = samples.pixels(count, int(rng.choice([8, 12])), seed=int(rng.integers(1 << 30)))
    return Inputs("bytes", {"pixels": values}, 3)


def _draw_series(rng: np.random.Generator, count: int) -> Inputs:
    length, features = int(rng.integers(4, 24)), int(rng.integers(1, 6))
    values = samples.series(count, length, features, seed=int(rng.integers(1 << 30)))
    if rng.random() < 0.3:
        units = 10.0 ** rng.uniform(-2.0, 3.0, features)
        values = (values * units).astype(np.float32)
    return Inputs("series", {"series": values}, features)


def _draw_tokens(rng: np.random.Generator, count: int) -> Inputs:
    length, seed = int(rng.integers(4, 20)), int(rng.integers(1 << 30))
    ids = samples.tokens(count, length, vocabulary=VOCABULARY, seed=seed)
    ids[:, 0] = 1 + ids[:, 0] % (VOCABULARY - 1)  # Avoids rows that contain only padding.
    if rng.random() < 0.5:
        mask = (ids != 0).astype(rng.choice(["int64", "float32"]))
        if rng.random() < 0.3:
            mask[:] = 1
        return Inputs("tokens", {"ids": ids, "mask": mask}, VOCABULARY, "mask")
    return Inputs("tokens", {"ids": ids}, VOCABULARY)
