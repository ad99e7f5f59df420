"""Update constraints.txt: the pinned versions of every package that any extra installs.

    make constraints              # keep pinned versions that pyproject.toml still allows
    make constraints UPGRADE=1    # pin the newest versions

pip resolves all extras at once without installing, so both packages of ONNX Runtime are pinned
although they exclude each other. Only names and versions are written, because package sources
(indexes, links, hosts) depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
ALL_EXTRAS = ".[dev,cpu]"
_HEAD = "# The whole dependency tree, pinned. Made by: make constraints\n"


def main() -> int:
    """Write the file. Return 0 if done, or 2 if pip cannot resolve the packages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="keep no pin")
    pin_options = [] if parser.parse_args().upgrade else ["-c", str(FILE)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet",
            "--dry-run", "--ignore-installed", "--report", str(report), *pin_options, ALL_EXTRAS,
        ]  # fmt: skip
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            print(
                "constraints.txt is as it was: pip finds no set of packages, see above. If a pin "
                "stands against pyproject.toml: make constraints UPGRADE=1.",
                file=sys.stderr,
            )
            return 2
        report_json = json.loads(report.read_text(encoding="utf-8"))
    FILE.write_text(_HEAD + "".join(f"{line}\n" for line in pins(report_json)), encoding="utf-8")
    print(f"{FILE.name} pins {len(pins(report_json))} packages. Next: make install.")
    return 0


def pins(report: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    """Return `name==version` for each package of pip's report, sorted by name."""
    versions = {
        package["metadata"]["name"]: package["metadata"]["version"] for package in report["install"]
    }
    versions.pop("parity-gate", None)
    return sorted((f"{name}=={version}" for name, version in versions.items()), key=_normalize_name)


def _normalize_name(line: str) -> str:
    return re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()


if __name__ == "__main__":
    sys.exit(main())
