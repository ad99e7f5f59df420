"""Build a release, check it in empty environments, and tag it: `make release`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.install_size import install
from gate import __version__


def main(root: Path) -> int:
    """Check, build and tag. Return 0 if the release is tagged, 2 if a requirement is missing."""
    tag = f"v{__version__}"
    if reason := _reason_against_release(root, tag):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    dist = root / "dist"
    _run(sys.executable, "-m", "build", "--outdir", str(dist), str(root))
    built = sorted(dist.glob(f"parity_gate-{__version__}*"))
    (wheel,) = (path for path in built if path.suffix == ".whl")
    with tempfile.TemporaryDirectory() as folder:
        checker = Path(folder, "checker")
        venv.create(checker, with_pip=True)
        python = str(checker / "bin" / "python")
        _run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "twine")
        _run(python, "-m", "twine", "check", "--strict", *map(str, built))
        installed = install(Path(folder, "installed"), wheel, "")
        output = subprocess.run(
            [installed.gate, "--version"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    if __version__ not in output:
        print(f"error: the installed gate is {output.strip()}, expected {__version__}. Remove "
              "build/ and dist/, and build again", file=sys.stderr)  # fmt: skip
        return 2
    _run("git", "-C", str(root), "tag", "-a", tag, "-m", f"parity-gate {__version__}")
    print(
        f"{tag} was built in {dist}, passed twine check, was installed in an empty environment, "
        f"and is tagged. Next: git push origin {tag}, then "
        f"twine upload {' '.join(path.name for path in built)}"
    )
    return 0


def _reason_against_release(root: Path, tag: str) -> str | None:
    """Return why this checkout can't be released, or None."""
    if _git(root, "status", "--porcelain"):
        return "there are uncommitted changes. Commit them first"
    if _git(root, "tag", "--list", tag):
        return f"the tag {tag} exists. Raise __version__ in gate/__init__.py"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"\n## [{__version__}]" not in changes:
        return f"CHANGELOG.md has no section '## [{__version__}]'. Rename '[Unreleased]'"
    return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
