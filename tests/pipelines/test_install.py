"""uv installs with pip's settings; pip installs if uv can't."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipelines.install import uv_settings

CONFIG = """\
:env:.find-links='/wheels'
global.cert='/certs.pem'
global.extra-index-url='file:///one file:///two'
global.no-index='true'
global.timeout='60'
"""


def test_indexes_and_certificates_of_pip_are_given_to_uv() -> None:
    assert uv_settings(CONFIG) == {
        "SSL_CERT_FILE": "/certs.pem",
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "file:///one file:///two",
        "UV_NO_INDEX": "true",
    }


@pytest.mark.further
def test_pip_is_tried_after_uv_and_its_exit_code_counts(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "true")  # uv itself is already installed
    command = [sys.executable, "pipelines/install.py", "no-such-package"]
    completed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert completed.returncode == 1
    assert "Installing with pip, because uv failed" in completed.stdout
    assert "No matching distribution found for no-such-package" in completed.stderr
