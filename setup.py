"""What pyproject.toml can't say: a wheel and an sdist hold the commit that they are made from, a
wheel nothing of an earlier build, and an sdist nothing but what a wheel is made of."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
PACKAGE = Path("gate")


def write_commit(folder: Path) -> None:
    """Write the commit of this checkout into `folder`; an sdist's own is there already."""
    sys.path.insert(0, str(ROOT))
    from gate.installation import COMMIT_FILE, commit_of

    commit = commit_of(ROOT)
    if commit is not None:
        (folder / PACKAGE / COMMIT_FILE).write_text(f"{commit}\n", encoding="utf-8")


class BuildPy(build_py):
    """An editable install reads the checkout itself."""

    def run(self) -> None:
        """Build from nothing, then write the commit."""
        if (
            not self.editable_mode
        ):  # else a module that is gone since stays in build/lib, and goes in
            shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class Sdist(sdist):
    """With the commit, for wheels that are made from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, then write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
