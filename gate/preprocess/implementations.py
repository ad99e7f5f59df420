"""Implementations by name: Pillow, torchvision, OpenCV, browser canvas."""

from __future__ import annotations

import base64
import importlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from gate.installation import FLAGS, chromium_missing, chromium_path
from gate.preprocess.spec import Geometry, PreprocessSpec, Resize, cropped, geometry, to_tensor
from gate.records.preprocessing import ImplementationName
from gate.storage.arrays import Pixels, Tensor

Preprocess = Callable[[Pixels], Tensor]
"""Preprocesses uint8 RGB (height, width, 3) to the tensor of one picture, without batch axis."""

WHERE: dict[ImplementationName, str] = {
    "pillow": "gate.preprocess.implementations:PILLOW_IMPLEMENTATION",
    "torchvision": "gate.preprocess.implementations:TORCHVISION_IMPLEMENTATION",
    "torchvision-no-antialias": "gate.preprocess.implementations:NO_ANTIALIAS",
    "opencv": "gate.preprocess.implementations:OPENCV_IMPLEMENTATION",
    "opencv-area": "gate.preprocess.implementations:AREA",
    "onnx": "gate.preprocess.onnx_graph:IMPLEMENTATION",
    "onnx-asymmetric": "gate.preprocess.onnx_graph:ASYMMETRIC",
    "canvas": "gate.preprocess.implementations:CANVAS_IMPLEMENTATION",
    "rust-image": "gate.preprocess.resample:IMPLEMENTATION",
}
"""Module and attribute by name. The module is imported on demand."""


def always(
    preprocess: Callable[[Pixels, PreprocessSpec], Tensor],
) -> Callable[[PreprocessSpec], AbstractContextManager[Preprocess]]:
    """Return `opened` for an implementation without resources."""
    return lambda spec: nullcontext(lambda pixels: preprocess(pixels, spec))


@dataclass(frozen=True)
class Implementation:
    """An implementation of the spec.

    `incapable` returns why it can't compute a spec on any machine, `missing` which dependency is
    not installed, or None. `opened` is a context manager for the function (a browser runs while it
    is open). `version` is the library's version. Call the last two only if `unusable_reason` is
    None.
    """

    incapable: Callable[[PreprocessSpec], str | None]
    opened: Callable[[PreprocessSpec], AbstractContextManager[Preprocess]]
    version: Callable[[], str]
    missing: Callable[[], str | None] = lambda: None

    def unusable_reason(self, spec: PreprocessSpec) -> str | None:
        """Return why it can't compute the spec on this machine, or None."""
        return self.incapable(spec) or self.missing()


def implementation(name: str) -> Implementation:
    """Return the implementation with this name, one of `WHERE`."""
    module, _, attribute = WHERE[name].partition(":")  # type: ignore[index]
    loaded: Implementation = getattr(importlib.import_module(module), attribute)
    return loaded


def _version_of(label: str, module: str) -> Callable[[], str]:
    return lambda: f"{label} {importlib.import_module(module).__version__}"


# Preprocessing in a web page. `antialias` sets imageSmoothingQuality to "high", otherwise "low",
# whose meaning depends on the browser. A canvas does not support bicubic.
_PAGE = """
async ({ png, box, spec }) => {
  const blob = await (await fetch("data:image/png;base64," + png)).blob();
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" });
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [box.width, box.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = spec.resize?.mode !== "nearest";
  context.imageSmoothingQuality = spec.resize?.antialias ? "high" : "low";
  context.drawImage(bitmap, 0, 0, box.width, box.height);
  const [height, width] = [box.bottom - box.top, box.right - box.left];
  const { data } = context.getImageData(box.left, box.top, width, height);
  const [low, high] = spec.value_range;
  const order = spec.channels === "bgr" ? [2, 1, 0] : [0, 1, 2];
  const tensor = new Float32Array(3 * height * width);
  for (let pixel = 0; pixel < height * width; pixel++) {
    for (let channel = 0; channel < 3; channel++) {
      let value = data[4 * pixel + order[channel]];
      if (high !== 255) value = low + (value / 255) * (high - low);
      if (spec.mean) value = (value - spec.mean[channel]) / spec.std[channel];
      const planar = spec.layout === "nchw";
      tensor[planar ? channel * height * width + pixel : 3 * pixel + channel] = value;
    }
  }
  const bytes = new Uint8Array(tensor.buffer);
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) {
    text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  }
  return btoa(text);
}
"""


@contextmanager
def _open_canvas(spec: PreprocessSpec) -> Iterator[Preprocess]:
    from playwright.sync_api import sync_playwright

    plain = json.loads(spec.model_dump_json())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            page = browser.new_page()
            yield lambda pixels: _draw(page, pixels, spec, plain)
        finally:
            browser.close()


def _draw(page: Any, pixels: Pixels, spec: PreprocessSpec, plain: dict[str, Any]) -> Tensor:
    from PIL import Image

    box = geometry(spec, *pixels.shape[:2])
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    arguments = {
        "png": base64.b64encode(stream.getvalue()).decode(),
        "box": box._asdict(),
        "spec": plain,
    }
    values = np.frombuffer(base64.b64decode(page.evaluate(_PAGE, arguments)), np.dtype("<f4"))
    height, width = box.bottom - box.top, box.right - box.left
    shape = (3, height, width) if spec.layout == "nchw" else (height, width, 3)
    return np.ascontiguousarray(values.reshape(shape), dtype=spec.dtype)


def _canvas_incapable(spec: PreprocessSpec) -> str | None:
    if spec.resize is not None and spec.resize.mode == "bicubic":
        return "a canvas has no bicubic filter"
    return None


def _canvas_version() -> str:
    import subprocess

    browser = chromium_path() or ""
    result = subprocess.run([browser, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "Chromium of unknown version"


CANVAS_IMPLEMENTATION = Implementation(
    _canvas_incapable, _open_canvas, _canvas_version, partial(chromium_missing, "preprocess")
)


def opencv_preprocess(pixels: Pixels, spec: PreprocessSpec, *, area: bool) -> Tensor:
    """Preprocess one picture, uint8 RGB (height, width, 3), with OpenCV. Raises DataError.

    area: shrink with INTER_AREA, OpenCV's box filter against aliasing. Otherwise uses INTER_LINEAR,
    INTER_CUBIC or INTER_NEAREST_EXACT.
    """
    import cv2

    box = geometry(spec, *pixels.shape[:2])
    picture: Any = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2BGR)  # Like imread.
    if spec.resize is not None:
        shrinks = box.height < len(pixels) or box.width < len(pixels[0])
        flag = _interpolation(spec.resize, area=area and shrinks)
        picture = cv2.resize(picture, (box.width, box.height), interpolation=flag)
    picture = cropped(picture, box)
    if spec.channels == "rgb":
        picture = cv2.cvtColor(np.ascontiguousarray(picture), cv2.COLOR_BGR2RGB)
    if spec.dtype != "uint8":
        picture = _normalized(picture, spec)
    if spec.layout == "nchw":
        picture = picture.transpose(2, 0, 1)
    tensor: Tensor = np.ascontiguousarray(picture, dtype=spec.dtype)
    return tensor


def _interpolation(resize: Resize, *, area: bool) -> int:
    import cv2

    if resize.mode == "nearest":
        return int(cv2.INTER_NEAREST_EXACT)
    if area:
        return int(cv2.INTER_AREA)
    return int(cv2.INTER_LINEAR if resize.mode == "bilinear" else cv2.INTER_CUBIC)


def _normalized(picture: Any, spec: PreprocessSpec) -> Any:
    values = picture.astype(np.float32)
    low, high = spec.value_range
    if high == 1:
        values *= np.float32((high - low) / 255.0)
        values += np.float32(low)
    if spec.mean is not None and spec.std is not None:
        values -= np.array(spec.mean, np.float32)
        values /= np.array(spec.std, np.float32)
    return values


def _opencv_incapable(spec: PreprocessSpec, *, area: bool) -> str | None:
    if area and spec.resize is not None and not spec.resize.antialias:
        return "INTER_AREA always antialiases, but the spec has antialias: false"
    return None


def _opencv_missing() -> str | None:
    if find_spec("cv2") is None:
        return "OpenCV is not installed: pip install 'parity-gate[preprocess]'"
    return None


def _opencv_implementation(*, area: bool) -> Implementation:
    opened = always(partial(opencv_preprocess, area=area))
    return Implementation(
        partial(_opencv_incapable, area=area), opened, _version_of("opencv", "cv2"), _opencv_missing
    )


OPENCV_IMPLEMENTATION = _opencv_implementation(area=False)

AREA = _opencv_implementation(area=True)


def pillow_preprocess(pixels: Pixels, spec: PreprocessSpec) -> Tensor:
    """Preprocess one picture, uint8 RGB (height, width, 3), with Pillow. Raises DataError."""
    box = geometry(spec, *pixels.shape[:2])
    resized = pixels if spec.resize is None else _resize(pixels, box, spec.resize)
    return to_tensor(cropped(resized, box), spec)


def pillow_incapable(spec: PreprocessSpec) -> str | None:
    """Return why Pillow can't compute the spec, or None. Its resize always antialiases. Its
    transform does not, but truncates (half a step too dark) and uses another bicubic (a = -1)."""
    if spec.resize and spec.resize.mode != "nearest" and not spec.resize.antialias:
        return "Pillow's resize always antialiases, but the spec has antialias: false"
    return None


def _resize(pixels: Pixels, box: Geometry, resize: Resize) -> Pixels:
    from PIL import Image

    resized = Image.fromarray(pixels).resize(
        (box.width, box.height), Image.Resampling[resize.mode.upper()]
    )
    return np.asarray(resized)


PILLOW_IMPLEMENTATION = Implementation(
    pillow_incapable, always(pillow_preprocess), _version_of("pillow", "PIL")
)


def torchvision_preprocess(pixels: Pixels, spec: PreprocessSpec, *, antialias: bool) -> Tensor:
    """Preprocess one picture, uint8 RGB (height, width, 3), with torchvision. Raises DataError."""
    import torch
    from torchvision.transforms.v2 import functional

    geometry(spec, *pixels.shape[:2])  # Raises for pictures that torchvision would pad.
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    image = _resized(image, spec, antialias=antialias)
    if spec.crop is not None:
        image = functional.center_crop(image, list(spec.crop))
    if spec.channels == "bgr":
        image = image.flip(0)
    if spec.dtype != "uint8":
        image = functional.to_dtype(image, torch.float32, scale=spec.value_range != (0, 255))
        if spec.value_range == (-1, 1):
            image = image * 2.0 - 1.0
        if spec.mean is not None and spec.std is not None:
            image = functional.normalize(image, list(spec.mean), list(spec.std))
    if spec.layout == "nhwc":
        image = image.permute(1, 2, 0)
    tensor: Tensor = np.ascontiguousarray(image.numpy(), dtype=spec.dtype)
    return tensor


def _resized(image: Any, spec: PreprocessSpec, *, antialias: bool) -> Any:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    if spec.resize is None:
        return image
    # torch's 'nearest' does not use half-pixel centers.
    mode = "NEAREST_EXACT" if spec.resize.mode == "nearest" else spec.resize.mode.upper()
    side = spec.resize.shortest_side
    return functional.resize(
        image,
        [side] if side is not None else list(spec.resize.size or ()),
        interpolation=InterpolationMode[mode],
        antialias=antialias and spec.resize.antialias,
    )


def _torchvision_implementation(*, antialias: bool) -> Implementation:
    return Implementation(
        lambda _spec: None,
        always(partial(torchvision_preprocess, antialias=antialias)),
        lambda: f"torchvision {metadata.version('torchvision')}",
    )


TORCHVISION_IMPLEMENTATION = _torchvision_implementation(antialias=True)

NO_ANTIALIAS = _torchvision_implementation(antialias=False)
