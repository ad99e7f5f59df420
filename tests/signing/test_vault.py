"""Keys in a key management service, through the signers of securesystemslib."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Signer, SSlibKey

from gate.errors import KeyUnusable
from gate.signing.keys import PIN_VARIABLE, VAULTS, SigningKey, is_in_vault, read_public
from gate.signing.statement import SignedStatement
from tests.signing import signing


class Vault(Signer):
    """A signer like a key management service: its public key has another id and line ends."""

    inside: ClassVar[CryptoSigner] = CryptoSigner.generate_ecdsa()
    address: ClassVar[str] = ""
    calls: ClassVar[list[Any]] = []

    def __init__(self, public: SSlibKey) -> None:
        self._public = public

    @classmethod
    def import_(cls, *arguments: Any) -> tuple[str, SSlibKey]:
        cls.calls.append(arguments)
        key = cls.inside.public_key
        pem = key.keyval["public"].replace("\n", "\r\n")
        return cls.address, SSlibKey("vault's own id", key.keytype, key.scheme, {"public": pem})

    @classmethod
    def from_priv_key_uri(cls, priv_key_uri, public_key, secrets_handler=None):
        cls.calls.append(priv_key_uri)
        return cls(public_key)

    @property
    def public_key(self) -> SSlibKey:
        return self._public

    def sign(self, payload: bytes):
        signature = self.inside.sign(payload)
        signature.keyid = self._public.keyid
        return signature


AZURE = "azurekms://safe.vault.azure.net/keys/gate"
ADDRESSES = {
    "awskms:arn:aws:kms:eu-1:1:key/ab": ("arn:aws:kms:eu-1:1:key/ab",),
    "awskms:alias/gate": ("alias/gate",),
    "gcpkms:projects/p/cryptoKeyVersions/1": ("projects/p/cryptoKeyVersions/1",),
    AZURE: ("safe", "gate"),
    f"{AZURE}/7": ("safe", "gate"),
    "hsm:": (None, None),
    "hsm:2?label=YubiKey+PIV+%2315": (2, "YubiKey PIV #15"),
}


@pytest.mark.parametrize(("uri", "arguments"), ADDRESSES.items())
def test_vault_key_signs_with_its_public_key_id(monkeypatch, uri, arguments) -> None:
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, uri.partition(":")[0], Vault)
    monkeypatch.setattr(Vault, "address", f"{AZURE}/7" if uri == AZURE else uri)
    monkeypatch.setattr(Vault, "calls", [])
    key = SigningKey.load(uri)
    assert Vault.calls[0][: len(arguments)] == arguments
    assert Vault.calls[1] == Vault.address
    assert key.public.name == uri
    assert key.public.key_id == Vault.inside.public_key.keyid
    signed = SignedStatement.sign(
        signing.statements(*signing.evidence_and_decision()).decision.statement, key
    )
    assert signed.signers([key.public]) == (key.public,)
    assert read_public(uri) == key.public


def test_other_key_version_is_not_confused_with_the_newest(monkeypatch) -> None:
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "azurekms", Vault)
    monkeypatch.setattr(Vault, "address", f"{AZURE}/8")
    with pytest.raises(KeyUnusable, match="not the newest version of the key, .*/8"):
        SigningKey.load(f"{AZURE}/7")


def test_vault_with_another_algorithm_is_detected(monkeypatch) -> None:
    class Other(Vault):
        def sign(self, payload: bytes):
            signature = CryptoSigner.generate_ecdsa().sign(payload)
            signature.keyid = self.public_key.keyid
            return signature

    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "awskms", Other)
    monkeypatch.setattr(Vault, "address", "awskms:x")
    statement = signing.statements(*signing.evidence_and_decision()).decision.statement
    with pytest.raises(KeyUnusable, match="does not verify with its public key"):
        SignedStatement.sign(statement, SigningKey.load("awskms:x"))


MISSING = {
    "awskms": "_aws_signer.AWS_IMPORT_ERROR",
    "gcpkms": "_gcp_signer.GCP_IMPORT_ERROR",
    "azurekms": "_azure_signer.AZURE_IMPORT_ERROR",
    "hsm": "_hsm_signer.PKCS11_IMPORT_ERROR",
}


@pytest.mark.parametrize("scheme", VAULTS)
def test_missing_library_is_reported_with_the_install_command(monkeypatch, scheme) -> None:
    monkeypatch.setattr(f"securesystemslib.signer.{MISSING[scheme]}", "missing")
    uri = AZURE if scheme == "azurekms" else f"{scheme}:1"
    with pytest.raises(KeyUnusable, match=rf"pip install 'securesystemslib\[{scheme}\]'"):
        SigningKey.load(uri)


@pytest.mark.parametrize("inside", [CryptoSigner.generate_rsa(), CryptoSigner.generate_ed25519()])
def test_only_supported_key_types_are_accepted(monkeypatch, inside) -> None:
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "awskms", Vault)
    monkeypatch.setattr(Vault, "address", "awskms:x")
    monkeypatch.setattr(Vault, "inside", inside)
    if inside.public_key.keytype == "ed25519":
        assert SigningKey.load("awskms:x").public.scheme == "ed25519"
        return
    with pytest.raises(KeyUnusable, match="a key of type rsa, expected Ed25519 or ECDSA"):
        SigningKey.load("awskms:x")


def test_vault_error_is_reported_without_the_pin(monkeypatch) -> None:
    class Refusing(Vault):
        @classmethod
        def import_(cls, *arguments: Any):
            pin = arguments[-1]("pin")
            raise PermissionError(f"wrong pin {pin} at https://u:secret-1@vault\nBearer abc")

    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "hsm", Refusing)
    with pytest.raises(KeyUnusable, match=PIN_VARIABLE):
        SigningKey.load("hsm:")
    monkeypatch.setenv(PIN_VARIABLE, "846291")
    with pytest.raises(
        KeyUnusable, match="is not a usable signing key: PermissionError"
    ) as refusal:
        SigningKey.load("hsm:")
    for secret in ("846291", "secret-1", "abc"):
        assert secret not in str(refusal.value)


INVALID_URIS = (
    "azurekms://safe.vault.azure.net",
    "azurekms://safe.vault.azure.net/secrets/x",
    "hsm:two",
)


@pytest.mark.parametrize("uri", INVALID_URIS)
def test_uri_without_a_key_is_refused(monkeypatch, uri) -> None:
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, uri.partition(":")[0], Vault)
    with pytest.raises(KeyUnusable, match="is not a usable signing key.*Expected"):
        SigningKey.load(uri)


@pytest.mark.parametrize("uri", ["awskm:x", "https://x", "gnupg:x", "file2:x", "pkcs11:x"])
def test_unknown_scheme_is_refused(uri) -> None:
    with pytest.raises(KeyUnusable, match="use one of file:, awskms:"):
        is_in_vault(uri)


def test_file_uri_loads_a_key_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:name").touch()
    assert not any(map(is_in_vault, ("file:x", "x", "/a/b", "./awskms:x", "odd:name")))
