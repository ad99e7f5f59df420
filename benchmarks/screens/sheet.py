"""The contact sheet: all screenshots on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment
from PIL import Image

from benchmarks.screens.camera import Picture
from gate.storage import files

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Screens of parity-gate</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 20px; background: #e9ecef; color: #1a1d21; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 20px; align-items: start; }
img { display: block; width: 100%; max-height: 640px; object-fit: cover; object-position: top;
  border: 1px solid #99a; background: #fff; }
</style>
</head>
<body>
<h1>Screens of parity-gate</h1>
<ul>
{% for one in pictures %}<li style="width: {{ [one.size[0] // 3, 240] | max }}px">
<a href="{{ one.path.name }}"><img src="{{ one.path.name }}" alt="{{ one.words }}"></a>
{{ one.words }}</li>
{% endfor %}
</ul>
</body>
</html>
"""


README = {
    "report": ("rejected-by-layer-1280-px-light-first-screen", 570),
    "version": ("version-that-waits-1280-px", 720),
}
"""Name in docs/, with the screenshot and the height of the visible part."""


def write_docs_images(folder: Path, docs: Path) -> None:
    """Write the images of the README and the docs with few colors, so that they are small."""
    for name, (screenshot, height) in README.items():
        with Image.open(folder / f"{screenshot}.png") as image:
            cropped = image.convert("RGB").crop((0, 0, image.width, height))
        # Rare colors are preserved, such as the red of a failed check.
        quantized = cropped.quantize(
            256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        quantized.save(docs / f"{name}.png", optimize=True)


def write_sheet(folder: Path, pictures: Sequence[Picture]) -> Path:
    """Write `index.html` and return its path. Raises StorageError."""
    path = folder / "index.html"
    page = Environment(autoescape=True).from_string(_PAGE).render(pictures=pictures)
    files.write_text(path, page)
    return path
