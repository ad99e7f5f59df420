"""What every implementation of the spec offers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor

Preprocess = Callable[[Pixels], Tensor]
"""uint8 RGB (height, width, 3) to the spec's tensor for one picture, without the batch axis."""


@dataclass(frozen=True)
class Implementation:
    """One way to do what the spec says.

    `lacking` says why it can't run here, or can't do this spec; None: it can. `opened` gives the
    function, for as long as the context is open (a browser runs meanwhile). `version` is of what
    it leans on. They may only be called where nothing is lacking.
    """

    lacking: Callable[[PreprocessSpec], str | None]
    opened: Callable[[PreprocessSpec], AbstractContextManager[Preprocess]]
    version: Callable[[], str]
