"""Keys of ledger writers, and trust settings that accept them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gate.signing.keys import SigningKey
from gate.signing.trust import Trust, TrustedKey


class Writers:
    """Keys that are created on first use, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: dict[str, SigningKey] = {}

    def key(self, name: str) -> SigningKey:
        if name not in self._keys:
            self._keys[name] = SigningKey.make(self._folder / f"{name}.pem")
        return self._keys[name]

    def trusting(
        self, names: Sequence[str] | str, revoked: tuple[str, ...] = (), **times: str
    ) -> Trust:
        """Return a trust with these writers; `times` limits the validity of the first one."""
        chosen = [names] if isinstance(names, str) else names
        keys = [self.key(name).public.to_plain() for name in chosen]
        return Trust(
            measurers=(TrustedKey(**self.key("measurer").public.to_plain()),),
            writers=tuple(
                TrustedKey(**key, **(times if number == 0 else {}))
                for number, key in enumerate(keys)
            ),
            revoked=tuple(self.key(name).public.key_id for name in revoked),
        )
