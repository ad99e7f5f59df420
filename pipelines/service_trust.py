"""The signing key and the trust file of the service of `make stack`.

Both are created in `.gate` on first use and never changed afterwards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gate.signing.keys import SigningKey
from gate.signing.local_keys import TRUST_VARIABLE
from gate.storage.files import temporary_folder, write_text
from pipelines import paths, signing
from pipelines.trust_file import EditedTrust, KeyTerms

_HEAD = """\
# Whose signatures count for the service of make stack, which reads this file anew at each look.
# Made on first use, and yours since then: gate keys trust prints the entries of other keys.
# The key of make repro is a measurer. Nobody is a reviewer until you say so: with review: required
# a tag is enough, and for review: signed a measurer's own key would not count.
# Both are writers: what make repro promotes directly goes into the same ledger.
"""


@dataclass(frozen=True)
class ServiceTrust:
    """The files with which `gate serve` is started."""

    key: Path
    """Signing key of the service."""
    trust: Path
    """Trust file that lists the project's key as a measurer."""

    @classmethod
    def from_project(cls) -> ServiceTrust:
        """Return the project's files; missing ones are created.

        GATE_TRUST overrides the trust file. Raises KeyUnusable, PolicyError, StorageError.
        """
        key = paths.state() / "keys" / "service.pem"
        service_key = SigningKey.from_file(key) if key.exists() else SigningKey.make(key)
        named = os.environ.get(TRUST_VARIABLE)
        trust = Path(named) if named else paths.state() / "service-trust.yaml"
        if not named and not trust.exists():
            local = signing.local_keys()
            project = local.signing_key().public
            with temporary_folder() as folder:
                draft = folder / trust.name
                trust_file = EditedTrust(draft)
                trust_file.trust(project, ("measurers", "writers"), KeyTerms())
                trust_file.trust(service_key.public, ("writers",), KeyTerms())
                trust_file.save()
                write_text(trust, _HEAD + draft.read_text("utf-8"))
            # The service also writes the ledger that the project reads.
            if local.trust_path.exists():
                project_trust = EditedTrust(local.trust_path)
                project_trust.trust(service_key.public, ("writers",), KeyTerms())
                project_trust.save()
        return cls(key, trust)
