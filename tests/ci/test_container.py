"""Static checks of Dockerfile and compose.yaml, because no container engine is available."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

from gate.commands.service import serve_command as serve
from gate.service import app
from tests.test_code_blocks import check_shell, parse_gate

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
COMPOSE = YAML(typ="safe").load(ROOT / "compose.yaml")
SERVICES = COMPOSE["services"]
IMAGES = ("service", "judge", "registry")


class Step(NamedTuple):
    word: str
    rest: str


class Stage(NamedTuple):
    name: str
    base: str
    steps: list[Step]

    def last(self, word: str) -> str | None:
        """Return the last instruction of this kind, also from the base stage."""
        matches = [step.rest for step in self.steps if step.word == word]
        above = STAGES.get(self.base)
        return matches[-1] if matches else above.last(word) if above else None


def stages(text: str) -> Iterator[Stage]:
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    defaults: dict[str, str] = {}
    stage = None
    for line in filter(str.strip, lines):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            if stage is not None:
                yield stage
            base, _, name = rest.partition(" AS ")
            for key, value in defaults.items():
                base = base.replace(f"${{{key}}}", value)
            stage = Stage(name, base, [])
        elif stage is None:
            assert word == "ARG"
            defaults.update([rest.split("=", 1)])
        else:
            stage.steps.append(Step(word, " ".join(rest.split())))
    assert stage is not None
    yield stage


STAGES = {stage.name: stage for stage in stages(TEXT)}


def installs(stage: Stage) -> list[str]:
    return [s.rest for s in stage.steps if s.word == "RUN" and "pip install" in s.rest]


def package_names(install: str) -> list[str]:
    """Return the packages from the index, without extras and options."""
    words = iter(install.partition(" install ")[2].split())
    matches = [
        word
        for word in words
        if not (word in ("-c", "--index-url") and next(words)) and not word.startswith("--")
    ]
    names = [word.strip('"').partition("[")[0] for word in matches]
    return [name for name in names if re.fullmatch(r"[a-z][a-z-]+", name) and name != "ls"]


def source_stages(stage: Stage) -> Iterator[Stage]:
    """Yield the stages from which this stage copies packages."""
    for step in stage.steps:
        if result := re.match(r"--from=(\S+)", step.rest):
            yield STAGES[result[1]]


def test_each_image_is_pinned_or_a_stage() -> None:
    for stage in STAGES.values():
        assert stage.base in STAGES or re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", stage.base)
    images = {service["image"] for service in SERVICES.values() if "build" not in service}
    assert images == {"postgres:17.6-bookworm"}
    assert ":latest" not in TEXT
    assert list(STAGES)[-1] == "service"  # docker build uses it without a target


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    for stage in STAGES.values():
        for step in stage.steps:
            if step.word != "COPY":
                continue
            *sources, _ = (word for word in step.rest.split() if not word.startswith("--"))
            if origin := re.match(r"--from=(\S+)", step.rest):
                assert origin[1] in STAGES
                assert list(STAGES).index(origin[1]) < list(STAGES).index(stage.name)
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                last = [rule for rule in ignore if fnmatch.fnmatch(source, rule.lstrip("!"))][-1]
                assert last.startswith("!"), f"{source} is ignored"


def test_packages_are_pinned_and_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text()
    assert "\nonnxruntime==" in pins
    for name in IMAGES:
        (packages,) = source_stages(STAGES[name])
        assert installs(packages)
        for line in installs(packages):
            assert "-c constraints.txt" in line
            for extras in re.findall(r"whl\)\[([a-z,]+)\]", line):
                assert set(extras.split(",")) <= set(project["optional-dependencies"])
            for package in package_names(line):
                assert f"\n{package}==" in pins
    (packages,) = source_stages(STAGES["service"])
    assert not any("torch" in line for line in installs(packages))


@pytest.mark.parametrize("name", IMAGES)
def test_images_run_as_an_unprivileged_user(name: str) -> None:
    assert STAGES[name].last("USER") == "10001:10001"
    owned = next(s.rest for s in STAGES["plain"].steps if s.word == "RUN")
    assert "-o 10001" in owned
    for folder in (STAGES[name].last("VOLUME") or "/var/lib/gate", "/run/gate"):
        assert folder in owned


def test_image_entrypoints_are_gate_commands() -> None:
    for name in ("service", "judge"):
        entry = json.loads(STAGES[name].last("ENTRYPOINT") or "[]")
        words = [*entry, *json.loads(STAGES[name].last("CMD") or "[]")]
        assert words[0] == "gate"
        parse_gate(words[1:])


def test_health_check_uses_an_endpoint_of_the_service() -> None:
    check = STAGES["service"].last("HEALTHCHECK") or ""
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert url is not None
    assert url[1] == STAGES["service"].last("EXPOSE") == "8400"
    assert f'Route("{url[2]}"' in Path(app.__file__).read_text()
    compile(json.loads(check[check.index("[") :])[2], "health", "exec")


def test_compose_binds_ports_to_localhost_and_drops_privileges() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
            target = service["build"]["target"]
            assert port.rpartition(":")[2] == STAGES[target].last("EXPOSE")
        if "build" in service:
            assert service["build"]["target"] in STAGES
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        assert "privileged" not in service
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in COMPOSE["volumes"], name


def test_compose_variables_are_read_by_gate_serve() -> None:
    read = {param.envvar for param in serve.params} | {"MLFLOW_TRACKING_URI"}
    assert set(SERVICES["service"]["environment"]) <= read
    for name in ("service", "registry"):
        script = SERVICES[name]["command"][-1].replace("$$", "$")
        subprocess.run(["sh", "-n", "-c", script], check=True)
    assert check_shell(SERVICES["service"]["command"][-1].replace("exec ", "")) == 2
    assert "http://service:8400/webhooks/mlflow" in SERVICES["service"]["command"][-1]


def test_password_files_are_created_once_and_private(tmp_path: Path) -> None:
    *program, script = SERVICES["passwords"]["command"]
    assert program == ["python", "-c"]
    script = script.replace('"/run/gate"', repr(str(tmp_path)))
    subprocess.run([sys.executable, "-c", script], check=True)
    created = {path.name: path.read_text() for path in tmp_path.iterdir()}
    mounted = re.findall(r"/run/gate/(\w+)", (ROOT / "compose.yaml").read_text())
    assert set(created) == set(mounted)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert created["database"] in created["registry"]
    assert created["database"] in created["state"]
    from cryptography.fernet import Fernet

    Fernet(created["webhooks"])
    subprocess.run([sys.executable, "-c", script], check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == created


# From the extra `dev`, or installed on this machine.
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: make install brings it on x86-64")
def test_hadolint_passes(tmp_path: Path) -> None:
    def said(file: Path) -> tuple[int, str]:
        command = [str(HADOLINT), "--no-color", str(file)]
        completed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        return completed.returncode, completed.stdout

    assert said(ROOT / "Dockerfile") == (0, "")
    (tmp_path / "Dockerfile").write_text(TEXT.replace("WORKDIR /src", "WORKDIR src"))
    code, result = said(tmp_path / "Dockerfile")
    assert code == 1
    assert "DL3000" in result  # an absolute folder
