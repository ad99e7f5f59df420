"""The spec by a browser's canvas: drawImage and getImageData in real headless Chromium.

What a page of onnxruntime-web does. `antialias` asks for imageSmoothingQuality "high", else "low";
the browser is free in how it takes either. It has no bicubic.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gate.bounded.chromium import FLAGS, chromium_missing, chromium_path
from gate.preprocess.geometry import geometry
from gate.preprocess.implementation import Implementation, Preprocess
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor

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
def _opened(spec: PreprocessSpec) -> Iterator[Preprocess]:
    from playwright.sync_api import sync_playwright

    plain = json.loads(spec.model_dump_json())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            page = browser.new_page()
            yield lambda pixels: _drawn(page, pixels, spec, plain)
        finally:
            browser.close()


def _drawn(page: Any, pixels: Pixels, spec: PreprocessSpec, plain: dict[str, Any]) -> Tensor:
    from PIL import Image

    box = geometry(spec, *pixels.shape[:2])
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    question = {
        "png": base64.b64encode(stream.getvalue()).decode(),
        "box": box._asdict(),
        "spec": plain,
    }
    values = np.frombuffer(base64.b64decode(page.evaluate(_PAGE, question)), np.dtype("<f4"))
    height, width = box.bottom - box.top, box.right - box.left
    shape = (3, height, width) if spec.layout == "nchw" else (height, width, 3)
    return np.ascontiguousarray(values.reshape(shape), dtype=spec.dtype)


def _incapable(spec: PreprocessSpec) -> str | None:
    if spec.resize is not None and spec.resize.mode == "bicubic":
        return "a canvas has no bicubic filter"
    return None


def _missing() -> str | None:
    return chromium_missing("preprocess")


def _version() -> str:
    import subprocess

    browser = chromium_path() or ""
    answer = subprocess.run([browser, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "Chromium of unknown version"


IMPLEMENTATION = Implementation(_incapable, _opened, _version, _missing)
