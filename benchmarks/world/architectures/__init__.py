"""All architectures of the second corpus, by name."""

from __future__ import annotations

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.architectures import images, own, sights, text, vision
from benchmarks.world.architectures.seeds import seeded

_ALL = (
    *images.ARCHITECTURES,
    *text.ARCHITECTURES,
    *sights.ARCHITECTURES,
    *vision.ARCHITECTURES,
    *own.ARCHITECTURES,
)

ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in (*_ALL, *seeded(_ALL))}
