"""A service that trusts the key of CI, and CI that submits signed releases, on a simulated registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gate import Policy
from gate.registry.create_version import create_version
from gate.registry.interface import CANDIDATE, Tag
from gate.registry.release import GoldenFolder, Release
from gate.signing.keys import SigningKey
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import test_preprocessing_spec as pictures
from tests.registry.promoting import submit
from tests.registry.releases import NAME, twin_policy
from tests.registry.signed import Signing, save_trust, trust_in
from tests.service.registry_setup import AUTOMATIC, Service

POLICY_WITH_TWIN = builders.policy(twin=twin_policy())


class SigningService(Service):
    """A service that trusts the key of CI."""

    trust: Path

    def __init__(self, folder: Path, policy: Policy = AUTOMATIC) -> None:
        super().__init__(folder, policy)
        self.policy = policy
        self.ci = SigningKey.make(folder / "ci.pem")
        self.untrusted_key = SigningKey.make(folder / "stranger.pem")
        self.trust = save_trust(trust_in(self.ci), folder / "trust.yaml")
        self.restart()

    def release(
        self, seed: int, *, policy: Policy | None = None, days: float = 0.0, **signing: Any
    ) -> Release:
        """Return a release that CI signs by default. `policy` is the policy of CI."""
        policy = policy or self.policy
        created = self.setup.release(seed, policy=policy, days=days)
        return Signing(**{"key": self.ci, **signing}).signed(created, policy)

    def with_golden(self, seed: int) -> Release:
        folder = self.setup.folder / f"golden-{seed}"
        created = self.setup.release(seed)
        origin = vectors.origin().model_copy(update={"policy_sha256": self.policy.digest()})
        vectors.write_model_vectors(folder, created.onnx_path, origin=origin)
        created = replace(created, golden=GoldenFolder.open(folder))
        return Signing(self.ci).signed(created, self.policy)

    def with_spec(self, seed: int) -> Release:
        return Signing(self.ci).signed(pictures.make_release(self.setup.folder, seed), self.policy)

    def submit(self, release: Release, *, policy: Policy | None = None) -> str:
        """Submit a release as CI does with `gate promote --hand-in`."""
        result = submit(self.setup.registry, release, policy=policy or self.policy)
        assert (result.outcome, result.version is None) == ("handed_in", False), result.reason
        assert result.version is not None
        return result.version

    def upload_unverified(self, release: Release) -> str:
        """Upload without verification, as anyone with write access to the registry can."""
        registry, status = self.setup.registry, "Status: all is well."
        number = create_version(registry, release, self.policy, status=status)
        registry.set_alias(NAME, CANDIDATE, number)
        return number

    def change_file(self, number: str, path: str, change: Callable[[bytes], bytes]) -> None:
        """Change a file stored with the version in the registry."""
        extra_files = self.setup.stored(number).extra_files
        extra_files[path] = change(extra_files[path])

    def actions_of(self, number: str) -> list[str]:
        """Return the ledger actions of a version."""
        return [action for action, version in self.setup.lines() if version == number]

    def page(self, number: str) -> str:
        """Return the first line of the version's description."""
        text: str = self.setup.stored(number).description
        return text.partition("\n")[0]

    def refusal(self, number: str) -> str:
        """Return the reason of a refusal, which is the same in the ledger, the tag and the page."""
        (line,) = [entry for entry in self.setup.ledger.entries() if entry.version == number]
        assert line.action == "refused"
        problem = line.reason.removeprefix("handed in, and refused: ")
        assert self.setup.stored(number).tags[Tag.REFUSED].endswith(problem[-200:])
        assert self.page(number).startswith("Status: handed in, and refused: ")
        return problem
