"""All architectures of the second corpus, by name."""

from __future__ import annotations

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.architectures import custom, images, text, vision, vision_sound_series
from benchmarks.world.architectures.seeds import with_seeds

_ALL = (
    *images.ARCHITECTURES,
    *text.ARCHITECTURES,
    *vision_sound_series.ARCHITECTURES,
    *vision.ARCHITECTURES,
    *custom.ARCHITECTURES,
)

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (*_ALL, *with_seeds(_ALL))
}
