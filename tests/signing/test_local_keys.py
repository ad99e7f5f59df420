"""The signing key of a folder is created once, private, and trusted there by default."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gate.errors import KeyUnusable, PolicyError
from gate.signing.keys import KEY_VARIABLE, SigningKey
from gate.signing.local_keys import TRUST_VARIABLE, LocalKeys
from gate.signing.trust import Trust


@pytest.fixture(autouse=True)
def _no_key_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def local(tmp_path: Path, printed: list[str]) -> LocalKeys:
    return LocalKeys(tmp_path / ".gate", printed.append)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_local_key_is_created_once_private_and_announced(
    local: LocalKeys, printed: list[str]
) -> None:
    key = local.signing_key()
    assert (mode(local.key_path.parent), mode(local.key_path)) == (0o700, 0o600)
    (message,) = printed
    assert f"signed by the key of this folder, {key.public.short}. It proves" in message
    assert local.key_path.read_text() not in message
    assert local.signing_key().public == key.public
    trust = local.trust()
    assert trust.measurers == trust.reviewers == trust.writers
    assert [each.public for each in trust.measurers] == [key.public.public]
    assert len(printed) == 1
    assert local.is_local_key(key.public)


def test_existing_trust_file_is_not_changed(local: LocalKeys, tmp_path: Path) -> None:
    second = LocalKeys(tmp_path / "other", print)
    second.trust()
    local.folder.mkdir()
    local.trust_path.write_bytes(second.trust_path.read_bytes())
    key = local.signing_key()
    assert key.public.key_id not in {each.key_id for each in local.trust().measurers}


def test_missing_trust_file_is_recreated(local: LocalKeys, printed: list[str]) -> None:
    key = local.signing_key()
    local.trust_path.unlink()
    assert local.trust().measurers[0].key_id == key.public.key_id
    assert len(printed) == 1


def test_no_local_key_is_created_when_a_key_is_named(
    local: LocalKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_key = SigningKey.make(tmp_path / "ci.pem")
    assert local.signing_key_if_any() is None
    assert local.trust_if_any() is None
    assert local.signing_key(str(tmp_path / "ci.pem")).public == named_key.public
    monkeypatch.setenv(KEY_VARIABLE, f"file:{tmp_path / 'ci.pem'}")
    result = local.signing_key_if_any()
    assert result is not None
    assert result.public == named_key.public
    assert not local.is_local_key(named_key.public)
    assert local.trust().by == " by --key alone, without --trust"
    assert not local.folder.exists()


def test_named_trust_file_is_used(
    local: LocalKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = LocalKeys(tmp_path / "other", print)
    trust = second.trust()
    assert local.trust(second.trust_path) == trust
    monkeypatch.setenv(TRUST_VARIABLE, str(second.trust_path))
    assert local.trust() == local.trust_if_any() == trust == Trust.from_file(second.trust_path)
    assert not local.folder.exists()
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "nowhere.yaml"))
    with pytest.raises(PolicyError, match=r"nowhere\.yaml"):
        local.trust()


def test_concurrent_processes_create_one_key(tmp_path: Path) -> None:
    """Both processes wait until both are ready."""
    program = (
        "import sys; from pathlib import Path; from gate.signing.local_keys import LocalKeys\n"
        "import gate.signing.keys, securesystemslib.signer\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "made = []; local = LocalKeys(Path(sys.argv[1]), made.append)\n"
        "print(local.signing_key().public.key_id, local.trust().measurers[0].key_id, len(made))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / ".gate")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert {word for output in outputs for word in output[:2]} == {outputs[0][0]}
    assert sorted(output[2] for output in outputs) == ["0", "1"]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_git_ignores_the_key_folder(local: LocalKeys, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("")
    local.signing_key()
    git(tmp_path, "add", ".")
    assert git(tmp_path, "ls-files").split() == ["model.py"]


def test_key_tracked_by_git_is_refused(local: LocalKeys, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    local.signing_key()
    git(tmp_path, "add", "--force", str(local.key_path))
    for uri in (None, str(local.key_path), f"file:{local.key_path}"):
        with pytest.raises(KeyUnusable, match="git rm --cached"):
            local.signing_key(uri)
    git(tmp_path, "rm", "-q", "--cached", str(local.key_path))
    assert local.signing_key().public.name == "local"
