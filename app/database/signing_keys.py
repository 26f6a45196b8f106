"""Which keys this process signs with, and whether this database knows them."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import psycopg

from app.settings import Settings
from app.signing import Signer, SigningKey

_SHORTEST = 32


class WrongSigningKey(RuntimeError):
    """The database was used with other keys: leases and callback URLs would fail without a word."""


def signer_of(settings: Settings) -> Signer:
    """The signer of the configured keys, or of the one kept in the data directory.

    Raises ValueError when a key is too short.
    """
    if settings.signing_keys is None:
        kept = kept_key(settings.data_directory / "signing-key", lambda: secrets.token_urlsafe(32))
        return Signer((SigningKey(kept.encode()),))
    secrets_given = [key.strip() for key in settings.signing_keys.get_secret_value().split(",") if key.strip()]
    if any(len(key) < _SHORTEST for key in secrets_given):
        raise ValueError(f"TOWPATH_SIGNING_KEYS: each key needs at least {_SHORTEST} characters")
    return Signer(tuple(SigningKey(key.encode()) for key in secrets_given))


def kept_key(path: Path, fresh_key: Callable[[], str]) -> str:
    """The key in a file that only its owner can read; a fresh one is put there when there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Exclusive and linked into place whole: two processes that start together agree on one key.
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(fresh_key())
        try:
            os.link(fresh, path)
        finally:
            fresh.unlink()
    except FileExistsError:
        pass
    return path.read_text().strip()


def claim_signing_keys(settings: Settings) -> Signer:
    """The signer, once the database knows its keys. A first key is remembered, by its fingerprint.

    Raises WrongSigningKey when none of the keys is one that the database has been used with.
    """
    signer = signer_of(settings)
    fingerprints = [key.fingerprint for key in signer.keys]
    with psycopg.connect(settings.database_url) as connection:
        # One at a time, or two processes with different keys could both be the first.
        connection.execute("LOCK TABLE towpath.signing_keys IN SHARE ROW EXCLUSIVE MODE")
        known = {row[0] for row in connection.execute("SELECT fingerprint FROM towpath.signing_keys").fetchall()}
        if known and known.isdisjoint(fingerprints):
            raise WrongSigningKey(
                "This database has been used with another signing key. Give every process the same"
                " TOWPATH_SIGNING_KEYS (or the same data directory); to change keys, put the new one first and"
                " keep the old one behind it until its leases and callback URLs are over."
            )
        connection.execute(
            "INSERT INTO towpath.signing_keys (fingerprint) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING",
            [fingerprints],
        )
    return signer
