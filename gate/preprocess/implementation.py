"""What every implementation of the spec offers, and all of them by name.

Each is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor
from gate.records.preprocessing import ImplementationName

Preprocess = Callable[[Pixels], Tensor]
"""uint8 RGB (height, width, 3) to the spec's tensor for one picture, without the batch axis."""
WHERE: dict[ImplementationName, tuple[str, str]] = {
    "pillow": ("pillow", "IMPLEMENTATION"),
    "torchvision": ("torchvision", "IMPLEMENTATION"),
    "torchvision-no-antialias": ("torchvision", "NO_ANTIALIAS"),
    "opencv": ("opencv", "IMPLEMENTATION"),
    "opencv-area": ("opencv", "AREA"),
    "onnx": ("onnx", "IMPLEMENTATION"),
    "onnx-asymmetric": ("onnx", "ASYMMETRIC"),
    "canvas": ("canvas", "IMPLEMENTATION"),
    "rust-image": ("rust_image", "IMPLEMENTATION"),
}
"""Module in `gate.preprocess.by` and name in it."""


def always(
    preprocess: Callable[[Pixels, PreprocessSpec], Tensor],
) -> Callable[[PreprocessSpec], AbstractContextManager[Preprocess]]:
    """`opened` of an implementation that has nothing to open."""
    return lambda spec: nullcontext(lambda pixels: preprocess(pixels, spec))


@dataclass(frozen=True)
class Implementation:
    """One way to do what the spec says.

    `incapable` says why it can't do this spec on any machine, `missing` what it needs and is not
    on this one; None: nothing. `opened` gives the function, for as long as the context is open (a
    browser runs meanwhile). `version` is of what it leans on. The last two may only be called
    where nothing is lacking.
    """

    incapable: Callable[[PreprocessSpec], str | None]
    opened: Callable[[PreprocessSpec], AbstractContextManager[Preprocess]]
    version: Callable[[], str]
    missing: Callable[[], str | None] = lambda: None

    def lacking(self, spec: PreprocessSpec) -> str | None:
        """Why it can't do the spec, or can't run here; None: it can."""
        return self.incapable(spec) or self.missing()


def implementation(name: str) -> Implementation:
    """The implementation of this name, one of `WHERE`."""
    module, attribute = WHERE[name]  # type: ignore[index]
    found: Implementation = getattr(
        importlib.import_module(f"gate.preprocess.by.{module}"), attribute
    )
    return found
