"""Stage `code`: make the model's source files visible to DVC.

The stage creates a folder of links to the files that define the model, starting at the factory. DVC
follows links: if a file changes, the output of this stage changes, and DVC reruns all stages that
depend on the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from importlib import metadata
from pathlib import Path

from gate.commands.result import ExitCode
from gate.errors import EvidenceError, StorageError
from gate.records.evidence import ModelCode
from pipelines import ci_files, paths, stage
from pipelines.params import ModelParams, ReleaseParams

RECORD = "code.json"


@ci_files.record_failure("code")
def main() -> int:
    """Write models/code/: a link for each source file, and code.json with packages and digests."""
    from gate.model.loading import modules_of
    from pipelines.model import build

    params = ModelParams.load()
    # Pretrained weights do not change the code, and would have to be downloaded.
    model = build(params.model_copy(update={"weights": None}))
    modules = modules_of(model, factory=params.name, chain=ReleaseParams.load().chain or "")
    code = modules.code()
    try:
        _link_files(paths.CODE, modules.paths)
    except OSError as error:
        raise StorageError(
            f"cannot link the model's source files in {paths.CODE}: {error}. Free space or fix "
            "permissions, then run dvc repro to go on."
        ) from error
    code.save(paths.CODE / RECORD)
    print(f"{paths.CODE}: {_describe(code)}")
    for name, reason in code.unread.items():
        print(f"  not read, so changes are not noticed: {name}: {reason}")
    return ExitCode.DONE


def refresh(folder: Path = paths.CODE) -> None:
    """Update the folder before DVC reads it, without importing the model.

    Record the versions of changed packages. Remove links to missing files, because DVC fails on
    them.
    """
    for link in folder.glob("*.py"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    with contextlib.suppress(EvidenceError):
        code = ModelCode.load(folder / RECORD)
        now = {name: _version(name) for name in code.packages}
        if now != code.packages:
            code.model_copy(update={"packages": now}).save(folder / RECORD)


def _link_files(folder: Path, files: dict[str, Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    root = paths.project_root()
    for name, path in files.items():
        inside = path.is_relative_to(root)
        target = os.path.relpath(path, folder.resolve()) if inside else path
        (folder / f"{name}.py").symlink_to(target)


def _describe(code: ModelCode) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in code.packages.items())
    count = len(code.files)
    return f"{count} source file{'' if count == 1 else 's'} of the model's own; {packages}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    stage.run(main)
