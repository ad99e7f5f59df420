"""Generate samples for models of other projects: tokens with a mask, word boxes, images, sounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.corpus import samples
from benchmarks.corpus.samples import Arrays

VOCABULARY = 100
LENGTH = 16
FIRST_TOKEN = 3
"""First ordinary token; smaller ids are special: padding, beginning, end."""


def text(
    count: int, seed: int, *, padding: int = 0, length: int = LENGTH, masked: bool = True
) -> Arrays:
    """Return `input_ids` and `attention_mask`, int64 (count, length), right-padded with
    `padding`.
    """
    ids = samples.tokens(count, length, vocabulary=VOCABULARY - FIRST_TOKEN, seed=seed)
    is_kept = ids != 0 if masked else np.ones_like(ids, dtype=bool)
    ids = np.where(is_kept, ids + FIRST_TOKEN - 1 + (ids == 0), padding).astype(np.int64)
    mask = is_kept.astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


def tokens(count: int, seed: int, *, length: int = LENGTH) -> Arrays:
    """Return `input_ids` only, int64 (count, length), without padding."""
    return {"input_ids": text(count, seed, length=length, masked=False)["input_ids"]}


def image(count: int, seed: int, *, size: int = 32) -> Arrays:
    """Return `pixel_values`, float32 (count, 3, size, size)."""
    return {"pixel_values": samples.normalized(count, size, seed=seed)}


def pages(count: int, seed: int) -> Arrays:
    """Return tokens and their boxes on a page: left, top, right, bottom in 0..63."""
    rng = np.random.default_rng(seed)
    corner = rng.integers(0, 40, (count, LENGTH, 2))
    boxes = np.concatenate([corner, corner + rng.integers(1, 24, (count, LENGTH, 2))], axis=2)
    return {**text(count, seed), "bbox": boxes.astype(np.int64)}


def sound(count: int, seed: int, *, length: int = 1600) -> Arrays:
    """Return chords with noise, float32 (count, length), with an amplitude of about 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(length) / 8000.0
    pitch = rng.uniform(80.0, 2000.0, (count, 3, 1))
    phase = rng.uniform(0.0, 2 * np.pi, (count, 3, 1))
    loud = rng.uniform(0.02, 0.4, (count, 3, 1))
    waves = (loud * np.sin(2 * np.pi * pitch * time + phase)).sum(axis=1)
    waves += rng.normal(0.0, 0.02, (count, length))
    return {"input_values": waves.astype(np.float32)}


def spectrum(count: int, seed: int, *, bands: int = 16, frames: int = 80) -> NDArray[np.float32]:
    """Return log-mel spectra, float32 (count, bands, frames): smooth, of about unit scale."""
    walks = samples.series(count, frames, bands, seed=seed)
    return np.ascontiguousarray(walks.transpose(0, 2, 1))
