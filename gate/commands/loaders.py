"""Open the ledger, keys, trust, releases and champion that options name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, cast

import click

from gate.commands.options import FILE, STATE_URL, address, tracking_uri
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    ModelError,
    PolicyError,
    RegistryError,
    StorageError,
    Untrusted,
)
from gate.storage.files import temporary_folder
from gate.storage.safe_text import redacted
from gate.storage.workspace import current_workspace, in_workspace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gate.commands.options import CheckRequest, _Command
    from gate.data.samples import SampleSet
    from gate.decision.champion import Champion
    from gate.decision.decide import Decision
    from gate.ledger.ledger import Ledger
    from gate.measure.job import Reference
    from gate.policy.policy import Policy, Task
    from gate.records.evidence import Evidence
    from gate.records.export import ExportSettings
    from gate.registry.interface import Alias
    from gate.registry.registered_model import RegisteredModel
    from gate.registry.release import EvaluatedFile, GoldenFolder, Release
    from gate.registry.verdict_signing import MeasuredFile, VerdictSigning
    from gate.registry.verify_release import VerifiedRelease
    from gate.signing.keys import SigningKey
    from gate.signing.local_keys import LocalKeys
    from gate.signing.trust import Trust
    from gate.signing.verification import Signatory, StatementPair
    from gate.storage.digest import Digest


@dataclass(frozen=True)
class ReportLocation:
    """An ONNX file and the folder of its report."""

    onnx_path: Path
    folder: Path
    golden: Path | None = None
    """Golden vectors to use instead of the report's."""

    def evaluated_file(self) -> EvaluatedFile:
        """Return the evaluated file in the folder, not verified and without its statements.

        Raises EvidenceError, DigestMismatch, StorageError.
        """
        from gate.decision.decide import Decision
        from gate.records.evidence import Evidence
        from gate.records.layout import DECISION, EVIDENCE
        from gate.registry.release import EvaluatedFile

        return EvaluatedFile(
            onnx_path=self.onnx_path,
            evidence=Evidence.load(self.folder / EVIDENCE),
            decision=Decision.load(self.folder / DECISION),
            golden=self._golden(),
        )

    def statements(self) -> StatementPair:
        """Return the statements in the folder. Raises Untrusted, StorageError."""
        from gate.signing.verification import StatementPair

        return StatementPair.from_folder(self.folder)

    def measured(self, statements: StatementPair) -> MeasuredFile:
        """Return the signed measurement, with the golden vectors in the folder."""
        from gate.records.layout import GOLDEN
        from gate.registry.verdict_signing import MeasuredFile

        return MeasuredFile(statements.evidence, self.folder / GOLDEN)

    def policy(self, decision: Decision) -> Policy:
        """Return the policy that made the decision: the report's or a built-in one.

        Raises PolicyError if neither has the digest of the decision.
        """
        from gate.policy.policy import Policy
        from gate.records.layout import POLICY

        tasks: tuple[Task, ...] = ("auto", "classification", "tensors")
        built_in = [make(task=task) for make in (Policy.default, Policy.reduced) for task in tasks]
        with suppress(EvidenceError, OSError):  # older reports have none
            built_in.insert(0, Policy.from_json((self.folder / POLICY).read_bytes()))
        matching = [policy for policy in built_in if policy.digest() == decision.policy_sha256]
        if not matching:
            raise PolicyError(
                f"the decision was made by a policy with digest {decision.policy_sha256.short}, "
                f"which is neither {self.folder / POLICY} nor a built-in policy. Name its file "
                "with --policy."
            )
        return matching[0]

    def _golden(self) -> GoldenFolder | None:
        """Return `golden`, else the vectors of the report; None for older reports without."""
        from gate.golden.folder import GOLDEN_JSON
        from gate.records.layout import GOLDEN
        from gate.registry.release import GoldenFolder

        reported = self.folder / GOLDEN
        if self.golden is None and not (reported / GOLDEN_JSON).exists():
            return None
        return GoldenFolder.open(self.golden or reported)


@dataclass(frozen=True)
class ReleaseVerifier:
    """Adds the statements of reports to a release, and verifies it for a registered model."""

    model: RegisteredModel
    trust: Trust
    report: ReportLocation
    twin: ReportLocation | None = None

    def verify(
        self, release: Release, policy: Policy, *, signing: VerdictSigning | None
    ) -> VerifiedRelease:
        """Verify the release with the statements of the reports.

        A verdict that is about this decision, but was signed for another model, for no model, or
        without the twin, is signed again if `signing` has a trusted key. Raises Untrusted if there
        is no such key, and the exceptions of `verify_release`.
        """
        from gate.registry.verify_release import verify_release

        release = replace(release, statements=self.report.statements())
        if release.twin is not None and self.twin is not None:
            statements = self.twin.statements()
            release = replace(release, twin=replace(release.twin, statements=statements))
        names = self.model.identities()
        try:
            return verify_release(release, policy=policy, trust=self.trust, registries=names)
        except Untrusted:
            self._verify_decisions(release)
            if signing is None or not signing.is_trusted:
                raise
        release = self._signed(release, policy, signing)
        return verify_release(release, policy=policy, trust=self.trust, registries=names)

    def _verify_decisions(self, release: Release) -> None:
        """Verify that the statements are about these decisions; their resource may differ."""
        from datetime import UTC, datetime

        for judged in release.evaluated_files:
            if judged.statements is not None:
                judged.statements.verify(
                    judged.evidence, judged.decision, trust=self.trust, now=datetime.now(UTC)
                )

    def _signed(self, release: Release, policy: Policy, signing: VerdictSigning) -> Release:
        twin = release.twin
        assert release.statements is not None  # set by `verify`
        return signing.sign(
            release,
            policy,
            measured=self.report.measured(release.statements),
            twin=self.twin.measured(twin.statements)
            if self.twin is not None and twin is not None and twin.statements is not None
            else None,
        )


STATE = Path(".gate")
"""The folder of the default signing key and trust file."""


@dataclass(frozen=True)
class Signing:
    """The signatory of a command's verdict, and the resource that it is about."""

    signatory: Signatory
    resource: str | None = None
    """URI of the registered model; None: the file."""

    @classmethod
    def from_options(
        cls, report: Path | None, *, key: str | None, model: str | None, registry: str
    ) -> Signing | None:
        """Return the signing of a report; None without a report.

        `model`: the name in the registry at this address, if the verdict is for one. Raises
        UsageError, KeyUnusable, StorageError.
        """
        if report is not None:
            resource = None
            if model:
                from gate.ledger.entry import plain  # slow: it imports the ledger's database
                from gate.signing.subjects import resource_uri

                identity = plain(in_workspace(registry, current_workspace()))
                resource = resource_uri(identity, model)
            return cls(signatory(local_keys().signing_key(key)), resource)
        if key is not None or model is not None:
            raise click.UsageError("--key and --name apply to a report: add --report DIR.")
        return None

    @property
    def label(self) -> str:
        """Return the name and the short ID of the key, for display."""
        return self.signatory.key.public.label

    def statements(
        self,
        evidence: Evidence,
        decision: Decision,
        *,
        policy: Policy,
        subjects: Mapping[str, Digest],
    ) -> StatementPair:
        """Sign evidence and decision as they are in memory. Raises KeyUnusable."""
        from gate.signing.subjects import file_resource
        from gate.signing.verification import StatementPair

        resource = self.resource or file_resource(decision.subject_sha256)
        return StatementPair(
            self.signatory.sign_measurement(evidence, subjects),
            self.signatory.sign_decision(
                decision, subjects, precision=policy.precision, resource=resource
            ),
        )


def signatory(key: SigningKey) -> Signatory:
    """Return the signatory with this key, and the code version of the current folder."""
    from gate.signing.predicates import code_version
    from gate.signing.verification import Signatory

    return Signatory(key, code_version(Path.cwd()))


def local_keys() -> LocalKeys:
    """Return the keys of the current folder; what they create is reported on stderr."""
    from gate.signing.local_keys import LocalKeys

    return LocalKeys(STATE, lambda text: click.echo(text, err=True))


TRUST_HELP = (
    "Default: .gate/trust.yaml, if it exists; else no signature is required. With the default, a "
    "ledger without any signature is accepted."
)
"""Help text about the trust with which a ledger is verified."""

WRITER_KEY = click.option(
    "--key", metavar="URI", envvar="GATE_SIGNING_KEY", show_envvar=True,
    help="Signing key: a file, awskms:…, gcpkms:…, azurekms:…, hsm:…. Default: "
    ".gate/keys/local.pem, if it exists.",
)  # fmt: skip


class LedgerOptions(TypedDict):
    """The ledger's database, the key that signs new entries, and the trust file."""

    state: str
    key: str | None
    trust: Path | None


def with_writing(command: _Command) -> _Command:
    """Add `--state`, `--key` and `--trust` to a command that writes into the ledger."""
    trust = click.option(
        "--trust", type=FILE, metavar="FILE", envvar="GATE_TRUST", show_envvar=True,
        help=f"Trusted keys: one of the writers must have signed the last line. {TRUST_HELP}",
    )  # fmt: skip
    return STATE_URL(WRITER_KEY(trust(command)))


def read_ledger(state: str) -> Ledger:
    """Open the ledger in the named database for reading, with the default trust.

    Raises BadParameter, PolicyError, StorageError.
    """
    from gate.ledger.ledger import Ledger

    return _with_trust(Ledger(parse_state(state)))


def open_existing_ledger(state: str) -> Ledger:
    """Open an existing ledger to show or verify it, without checking its signatures.

    Also raises StorageError if there is no ledger: a missing ledger is not an empty one.
    """
    from gate.ledger.ledger import Ledger

    return _require_existing(Ledger(parse_state(state)))


def _require_existing(ledger: Ledger) -> Ledger:
    if not ledger.state.exists:
        raise StorageError(
            f"there is no ledger at {ledger.location}: nothing was promoted or refused from this "
            "folder. gate promote creates it; --state names another database."
        )
    return ledger


def open_trusted_ledger(state: str) -> Ledger:
    """Open an existing ledger with the default trust.

    Raises the exceptions of `open_existing_ledger` and `read_ledger`.
    """
    return _with_trust(open_existing_ledger(state))


def open_writable_ledger(options: LedgerOptions, *, is_new_allowed: bool = False) -> Ledger:
    """Open the ledger for writing, with the signing key and the trusted writers.

    Raises the exceptions of `read_ledger`, KeyUnusable, PolicyError, Untrusted if the key is not a
    trusted writer, and StorageError if there is no ledger, unless `is_new_allowed`.
    """
    from gate.ledger.ledger import Ledger, require_writable

    key = local_keys().signing_key_if_any(options["key"])
    ledger = _with_trust(Ledger(parse_state(options["state"]), key=key), options["trust"])
    require_writable(ledger)
    return ledger if is_new_allowed else _require_existing(ledger)


def _with_trust(ledger: Ledger, trust: Path | None = None) -> Ledger:
    from gate.ledger.ledger import verify_writer

    return verify_writer(ledger, local_keys(), trust)


def parse_state(state: str) -> str:
    """Return the URL of the named database. Raises BadParameter, StorageError."""
    from gate.ledger.database import state_url

    text = address(state) or state
    try:
        return state_url(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{error} (seen: {redacted(text)!r})", param_hint="--state"
        ) from error


@dataclass(frozen=True)
class Against:
    """A registered model; a file is compared with its champion."""

    model: RegisteredModel
    trust: Trust | None
    """Trust for the champion's statements, used if the ledger has no entry about it."""

    @classmethod
    def from_request(cls, name: str, request: CheckRequest) -> Self:
        """Create it from the options of gate check.

        Raises BadParameter, UsageError, PolicyError, EvidenceError, KeyUnusable, StorageError.
        """
        from gate.mlflow_client.registry import MlflowRegistry
        from gate.registry.registered_model import RegisteredModel

        registry = MlflowRegistry(tracking_uri(request.tracking_uri))
        model = RegisteredModel(registry, read_ledger(request.state), name)
        keys, trust = local_keys(), request.trust
        if request.report is None:
            return cls(model, keys.trust_if_any(trust))
        # The report is signed, so the local key and with it the local trust exist.
        return cls(model, keys.trust(trust, key=request.key))

    def require_model(self) -> None:
        """Raise BadParameter if the registry has no such model.

        If the registry does not answer, `champion` reports that.
        """
        registry, name = self.model.registry, self.model.name
        try:
            exists = registry.has_model(name)
        except RegistryError:
            return
        if not exists:
            raise click.BadParameter(
                f"--against {name}: {registry.identity} has no registered model of this name. "
                "Check the name and --tracking-uri; omit --against for the first version."
            )

    def champion(self, *, policy: Policy, into: Path) -> Champion:
        """Download the champion into `into` and return it.

        If the policy has no bounds against the champion, an error is recorded in the result.
        Otherwise raises RegistryError, EvidenceError, StorageError.
        """
        from gate.registry.load_champion import champion_if_any, load_champion

        fetch = champion_if_any if policy.incumbent is None else load_champion
        return fetch(self.model, into=into, trust=self.trust)


@contextmanager
def downloaded_reference(reference: str, *, uri: str | None) -> Iterator[tuple[str, str]]:
    """Yield the location of a reference, and its name for the records.

    The ONNX file of a registered version is downloaded, and removed when the context ends. `uri`:
    the registry, or None for the default. Raises ModelError if there is no such version,
    DigestMismatch if its file is not the promoted one, RegistryError.
    """
    from gate.model.factory import parse_registered

    registered = parse_registered(reference)
    if registered is None:
        yield reference, reference
        return
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.onnx_file.reading import read_subject
    from gate.registry.interface import Tag

    name, alias, number = registered
    registry = MlflowRegistry(tracking_uri(uri))
    if number is None:
        number = registry.alias(name, cast("Alias", alias))
    if number is None:
        raise ModelError(
            f"--reference {reference}: {registry.identity} has no model '{name}' with the alias "
            f"'{alias}'. Check the name, the alias and --tracking-uri."
        )
    with temporary_folder() as folder:
        path = registry.download(name, number, folder)
        promoted = registry.version(name, number).tags.get(Tag.SHA256)
        sha256 = read_subject(path).sha256
        if promoted not in (None, sha256.hex):
            raise DigestMismatch(
                f"--reference {reference}: the file of version {number} has the SHA-256 "
                f"{sha256.hex}, but {promoted} was promoted. It was replaced: promote it again."
            )
        yield str(path), f"models:/{name}/{number}"


def open_reference(
    reference: str,
    *,
    checkpoint: Path | None,
    uri: str | None = None,
    preprocessing: Path | None = None,
    export_record: Path | None = None,
) -> Reference:
    """Build the reference, or read its file, which is kept until the command ends.

    Raises ModelError, CheckpointError, and the exceptions of `downloaded_reference`.
    """
    from gate.measure.job import Reference

    context = click.get_current_context()
    source, name = context.with_resource(downloaded_reference(reference, uri=uri))
    return Reference.from_factory(
        source, checkpoint=checkpoint, preprocessing=preprocessing, export_record=export_record
    ).named(name)


def open_samples(
    inputs: str, *, preprocessing: Path | str | None, batch_axes: Iterable[tuple[str, int | None]]
) -> SampleSet:
    """Open samples; a preprocessing spec turns pictures into inputs. Raises DataError,
    PolicyError, StorageError."""
    from gate.data.samples import SampleSet
    from gate.preprocess.spec import PreprocessSpec

    spec = PreprocessSpec.from_file(Path(preprocessing)) if preprocessing else None
    return SampleSet.open(inputs, preprocessing=spec).with_batch_axes(dict(batch_axes))


def load_export_settings(path: Path | None) -> ExportSettings:
    """Return the section `export:` of a file; the defaults without a file. Raises PolicyError."""
    from gate.records.export import ExportSettings
    from gate.storage.yaml_section import load_section

    return load_section(ExportSettings, path, "export") if path else ExportSettings(opset="auto")


def load_champion_records(model: RegisteredModel, trust: Trust | None = None) -> Champion:
    """Return the champion's data without its file; a failure is recorded in the result."""
    from gate.registry.load_champion import champion_if_any

    with temporary_folder() as folder:
        return replace(champion_if_any(model, into=folder, trust=trust), onnx_path=None)
