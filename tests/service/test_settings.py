from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gate.errors import ServiceError, StorageError
from gate.service import settings
from gate.service.settings import ServiceSettings, WebhookSecrets

VALID_OPTIONS: dict[str, Any] = {"models": ["digits"], "tracking_uri": "http://127.0.0.1:5000"}


def test_default_workspace_prefix_is_removed_from_model_names() -> None:
    models = ("default:digits", "digits", "team-a:digits", "team-a:digits", "team-b:digits")
    settings = ServiceSettings.from_options(models=models, tracking_uri="http://127.0.0.1:5000")
    assert settings.models == ("digits", "team-a:digits", "team-b:digits")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": []}, "models: .*at least 1"),
        ({"models": ["example_model"]}, "test deliveries"),
        ({"port": 65_536}, "port"),
        ({"interval_s": 0}, "interval_s"),
        ({"state": "mysql://x"}, "state: the state is sqlite:///FILE"),
        ({"state": "/tmp"}, "state: the state is sqlite:///FILE"),
        ({"state": "sqlite:///:memory:"}, "in memory"),
        ({"log_format": "xml"}, "log_format"),
        ({"body_cap": 0}, "body_cap"),
        ({"body_timeout_s": 0}, "body_timeout_s"),
        ({"window_s": float("inf")}, "window_s"),
        ({"window_s": 7200}, "window_s"),
        ({"notify_url": "http://x", "tracking_uri": "http://me:hunter2@r"}, "go together"),
        ({"notify_url": "ftp://x", "notify_secret_file": "notify"}, "notify_url"),
        ({"notify_url": "http://me:hunter2@x/", "notify_secret_file": "notify"}, "notify_url"),
        ({"nonsense": 1}, "nonsense: Extra"),
    ],
)
def test_invalid_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as refused:
        ServiceSettings.from_options(**VALID_OPTIONS | given)
    assert "hunter2" not in str(refused.value)


def test_missing_setting_names_its_option() -> None:
    with pytest.raises(ServiceError, match="--model$"):
        ServiceSettings.from_options(tracking_uri="http://127.0.0.1:5000")


def test_each_invalid_field_has_a_line_without_passwords() -> None:
    with pytest.raises(ServiceError) as caught:
        ServiceSettings.from_options(
            models=[], tracking_uri="", port=-1, state="mysql://gate:hunter2@db/x"
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "hunter2" not in str(caught.value)


FIRST, SECOND = "the first of two secrets", "the second of two secrets"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    settings.write_secrets(path, [FIRST, SECOND])
    return path


@pytest.mark.parametrize("umask", [0, 0o077])
def test_written_secrets_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        settings.write_secrets(tmp_path / "secrets", [FIRST, SECOND])
    finally:
        os.umask(before)
    assert WebhookSecrets.from_file(tmp_path / "secrets").secrets == (FIRST, SECOND)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o600


def test_secret_added_while_the_file_is_read_first_is_used(path: Path, monkeypatch) -> None:
    def read_then_rotate(file: Path, **options: str) -> str:
        text = read_private(file, **options)
        settings.write_secrets(file, [SECOND])
        return text

    read_private = settings.read_private
    with monkeypatch.context() as patch:
        patch.setattr(settings, "read_private", read_then_rotate)
        secrets = WebhookSecrets.from_file(path)
    assert secrets.secrets == (SECOND,)


def test_blank_lines_and_whitespace_are_ignored(path: Path) -> None:
    path.write_text(f"\n  {FIRST}\r\n\n{SECOND}")
    assert WebhookSecrets.from_file(path).secrets == (FIRST, SECOND)


def _remove(path: Path) -> None:
    path.unlink()


def _write_blank_lines(path: Path) -> None:
    path.write_text(" \n\n")


def _write_short_secret(path: Path) -> None:
    path.write_text(f"{FIRST}\nshort\n")


def _write_binary(path: Path) -> None:
    path.write_bytes(b"\xff" * 40)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_remove, "cannot read"),
        (_write_blank_lines, "has no secret"),
        (_write_short_secret, "secret 2 .* has 5 characters"),
        (_write_binary, "not UTF-8"),
        (_replace_by_folder, "cannot read"),
        (lambda path: path.chmod(0o640), "mode 0640.*chmod 600"),
        (lambda path: path.chmod(0o604), "mode 0604"),
        (lambda path: path.chmod(0o700), "mode 0700"),
    ],
)
def test_invalid_secret_file_is_refused(path: Path, tamper, message: str) -> None:
    tamper(path)
    with pytest.raises(ServiceError, match=message) as caught:
        WebhookSecrets.from_file(path)
    assert FIRST not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_changed_file_is_read_again(path: Path) -> None:
    secrets = WebhookSecrets.from_file(path)
    settings.write_secrets(path, ["a third secret that is new"])
    assert secrets.secrets == ("a third secret that is new",)
    assert secrets.all_secrets == {FIRST, SECOND, "a third secret that is new"}


def test_unusable_file_keeps_the_last_secrets(path: Path, caplog) -> None:
    secrets = WebhookSecrets.from_file(path)
    path.unlink()
    assert secrets.secrets == (FIRST, SECOND)
    path.write_text("")
    assert secrets.secrets == (FIRST, SECOND)
    assert caplog.text.count("stay valid") == 2
    settings.write_secrets(path, [SECOND])
    assert secrets.secrets == (SECOND,)


def test_secrets_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SECRETS_VARIABLE, f"{FIRST}\n{SECOND}")
    assert WebhookSecrets.from_environment().secrets == (FIRST, SECOND)
    monkeypatch.setenv(settings.SECRETS_VARIABLE, "")
    with pytest.raises(ServiceError, match="has no secret"):
        WebhookSecrets.from_environment()
    monkeypatch.delenv(settings.SECRETS_VARIABLE)
    with pytest.raises(ServiceError, match=settings.SECRETS_VARIABLE):
        WebhookSecrets.from_environment()


def test_writing_through_a_symlink_keeps_it(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path.name)
    settings.write_secrets(link, [SECOND])
    assert link.is_symlink()
    assert WebhookSecrets.from_file(path).secrets == (SECOND,)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_owner_of_the_file_is_kept(path: Path) -> None:
    os.chown(path, 12345, 54321)
    settings.write_secrets(path, [SECOND])
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        settings.write_secrets(tmp_path / "file" / "secrets", [FIRST])
