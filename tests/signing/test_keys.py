"""Key files are private and never shown; keys of a key management service sign like them."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Signer, SSlibKey

from gate.errors import KeyUnusable, StorageError
from gate.signing.keys import PIN_VARIABLE, VAULTS, PublicKey, SigningKey, is_in_vault, read_public
from gate.signing.statement import SignedStatement
from tests.signing import signing
from tests.signing.signing import key


def private_pem(private, password: bytes | None = None) -> bytes:
    encryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def write_private(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("scheme", ["ed25519", "ecdsa"])
def test_created_key_is_private_and_loads(tmp_path: Path, scheme) -> None:
    old = os.umask(0)
    try:
        created = SigningKey.make(tmp_path / "keys" / "ci.pem", scheme=scheme)
    finally:
        os.umask(old)
    path = tmp_path / "keys" / "ci.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["ci.pem", "ci.pub"]
    again = SigningKey.load(f"file:{path}")
    assert again.public == created.public == SigningKey.load(str(path)).public
    assert created.public.name == "ci"
    assert created.public.scheme.startswith(scheme)
    signature = again.sign(b"bytes")
    created.public.verifier.verify_signature(signature, b"bytes")
    assert read_public(str(path.with_suffix(".pub"))) == created.public == read_public(str(path))


def test_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ci.pem"
    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(SigningKey.make, path) for _ in range(4)]
    created = [each.result() for each in attempts if each.exception() is None]
    assert len(created) == 1
    assert SigningKey.load(str(path)).public == created[0].public
    assert all(isinstance(each.exception(), KeyUnusable) for each in attempts if each.exception())
    (tmp_path / "link.pem").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyUnusable, match="already exists"):
        SigningKey.make(tmp_path / "link.pem")


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_openssl_ecdsa_pem_loads(tmp_path: Path, curve) -> None:
    path = write_private(tmp_path / "ci.pem", private_pem(ec.generate_private_key(curve)))
    loaded = SigningKey.load(str(path))
    loaded.public.verifier.verify_signature(loaded.sign(b"bytes"), b"bytes")


INVALID_KEYS = {
    "nothing": b"",
    "no PEM": b"\x00\xff",
    "a secret that is no key": b"hunter2-hunter2",
    "a public key": key().public.public.encode(),
    "RSA": private_pem(rsa.generate_private_key(65537, 2048)),
    "another curve": private_pem(ec.generate_private_key(ec.SECP256K1())),
    "a password": private_pem(ed25519.Ed25519PrivateKey.generate(), b"secret"),
}


@pytest.mark.parametrize("data", INVALID_KEYS.values(), ids=INVALID_KEYS.keys())
def test_invalid_key_is_refused_without_showing_it(tmp_path: Path, data) -> None:
    path = write_private(tmp_path / "ci.pem", data)
    with pytest.raises(
        KeyUnusable, match="not a signing key: expected an Ed25519 or ECDSA private key"
    ) as refusal:
        SigningKey.load(str(path))
    assert "hunter2" not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_key_must_be_a_regular_file_of_the_user(tmp_path: Path, monkeypatch) -> None:
    path = SigningKey.make(tmp_path / "ci.pem") and tmp_path / "ci.pem"
    (tmp_path / "link.pem").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.pem", 0o600)
    table = {
        "link.pem": "it is a link",
        "pipe.pem": "not a regular file",
        "none.pem": "gate keys new",
    }
    for name, message in table.items():
        with pytest.raises(StorageError, match=message):
            SigningKey.load(str(tmp_path / name))
    path.chmod(0o640)
    with pytest.raises(StorageError, match="mode 0640"):
        SigningKey.load(str(path))
    path.chmod(0o400)
    SigningKey.load(str(path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="belongs to user"):
        SigningKey.load(str(path))
    monkeypatch.undo()
    write_private(tmp_path / "huge.pem", b"x" * (1 << 17))
    with pytest.raises(StorageError, match="more than 65536 bytes"):
        SigningKey.load(str(tmp_path / "huge.pem"))


def test_repr_shows_nothing_private(tmp_path: Path) -> None:
    created = SigningKey.make(tmp_path / "ci.pem")
    private = (tmp_path / "ci.pem").read_text().splitlines()[1]
    assert private not in repr(created) + str(vars(created)) + repr(created.public)


def test_signing_failure_is_reported_without_secrets() -> None:
    class Refusing:
        public_key = key().signer.public_key

        def sign(self, data: bytes):
            raise RuntimeError("AccessDenied for https://user:hunter2@vault.example.org\nstack")

    with pytest.raises(KeyUnusable, match="can't sign now: RuntimeError: AccessDenied") as refusal:
        SigningKey(Refusing(), key().public).sign(b"bytes")  # type: ignore[arg-type]
    assert "hunter2" not in str(refusal.value)
    assert "stack" not in str(refusal.value)


def test_key_id_does_not_depend_on_the_pem_format() -> None:
    public = key().public
    wrapped = b"Subject: ci\n\n" + public.public.encode().replace(b"\n", b"\r\n")
    assert PublicKey.from_pem(wrapped, path=Path("x")).key_id == public.key_id
    with pytest.raises(ValueError, match="the ID of this key is"):
        PublicKey(name="x", public=public.public, key_id="0" * 64)


@pytest.mark.parametrize(
    "pem", [b"", b"\xff", b"-----BEGIN PUBLIC KEY-----\n", INVALID_KEYS["RSA"]]
)
def test_invalid_public_key_is_refused(pem) -> None:
    with pytest.raises(KeyUnusable, match="not a public key"):
        PublicKey.from_pem(pem, path=Path("x"))


def test_key_id_matches_securesystemslib_and_openssl_reads_the_file(tmp_path: Path) -> None:
    created = SigningKey.make(tmp_path / "ci.pem")
    assert created.public.key_id == created.signer.public_key.keyid
    completed = subprocess.run(
        ["openssl", "pkey", "-in", tmp_path / "ci.pem", "-pubout"], capture_output=True, check=True
    )
    assert completed.stdout.decode() == created.public.public


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
