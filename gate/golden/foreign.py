"""Running a foreign ONNX file in a child process, within limits: a loop in it need not end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gate.bounded.call import call
from gate.bounded.limits import ChildLimits
from gate.errors import PackageMissing, first_line
from gate.golden.result import GoldenResult
from gate.golden.verify import verify_golden
from gate.onnxfile.session import open_on_cpu, refuse_out_of_memory
from gate.storage.digest import Digest


def verify_within(
    model_path: Path,
    folder: Path,
    limits: ChildLimits | None,
    *,
    sha256: Digest | None = None,
    golden_sha256: Digest | None = None,
) -> GoldenResult:
    """As `verify_golden`; None: the file is our own, and runs in this process.

    Raises LimitExceeded besides, and EvidenceError for an answer that makes no sense.
    """
    if limits is None:
        return verify_golden(model_path, folder, sha256=sha256, golden_sha256=golden_sha256)
    given = {"sha256": sha256, "golden_sha256": golden_sha256}
    arguments = {name: digest and str(digest) for name, digest in given.items()}
    arguments |= {"model_path": str(model_path), "folder": str(folder)}
    what = f"running {model_path.name}"
    plain = call(f"{__name__}:verified", arguments, limits=limits, what=what)
    return GoldenResult.from_json(json.dumps(plain))


def loading_problem(path: Path, limits: ChildLimits | None) -> str | None:
    """Why ONNX Runtime can't load the file at `path`, or None. Without limits in this process.

    Raises LimitExceeded.
    """
    if limits is None:
        return opened(str(path))
    what = f"loading {path.name}"
    problem = call(f"{__name__}:opened", {"path": str(path)}, limits=limits, what=what)
    return None if problem is None else str(problem)


def verified(
    model_path: str, folder: str, sha256: str | None, golden_sha256: str | None
) -> dict[str, Any]:
    """The child's side of `verify_within`."""
    result = verify_golden(
        Path(model_path), Path(folder), sha256=_digest(sha256), golden_sha256=_digest(golden_sha256)
    )
    return result.to_plain()


def opened(path: str) -> str | None:
    """The child's side of `loading_problem`."""
    try:
        open_on_cpu(Path(path))
    except PackageMissing:  # which says nothing of the file
        raise
    except Exception as error:
        refuse_out_of_memory(error, what=f"loading {Path(path).name}")
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _digest(text: str | None) -> Digest | None:
    return None if text is None else Digest.parse(text)
