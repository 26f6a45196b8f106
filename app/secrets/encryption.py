"""Encrypts secrets with a key that is not in the database. The first key encrypts; every key decrypts."""

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from app.database.signing_keys import kept_key
from app.errors import Kind, Refusal
from app.settings import Settings


class Vault:
    """Seals and opens values; its keys can be rotated without a moment when old values can't be opened."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except ValueError:
            raise ValueError(
                "TOWPATH_ENCRYPTION_KEYS: each key is 32 random bytes in URL-safe base64 (44 characters)"
            ) from None

    def seal(self, value: str) -> bytes:
        """The value, encrypted with the first key."""
        return self._fernet.encrypt(value.encode())

    def open(self, sealed: bytes) -> str:
        """The value. Raises Refusal: none of the keys fits."""
        try:
            return self._fernet.decrypt(sealed).decode()
        except InvalidToken:
            raise _unreadable() from None

    def resealed(self, sealed: bytes) -> bytes:
        """The same value, encrypted with the first key. Raises Refusal: none of the keys fits."""
        try:
            return self._fernet.rotate(sealed)
        except InvalidToken:
            raise _unreadable() from None


def _unreadable() -> Refusal:
    return Refusal(
        Kind.UNAVAILABLE,
        "secret-unreadable",
        "A secret was encrypted with a key that this process does not have.",
        retry_after_seconds=60,
    )


def vault_of(settings: Settings) -> Vault:
    """The vault of the configured keys, or of the one kept in the data directory.

    Raises ValueError when a key is none.
    """
    if settings.encryption_keys is None:
        return Vault((kept_key(settings.data_directory / "encryption-key", lambda: Fernet.generate_key().decode()),))
    given = settings.encryption_keys.get_secret_value().split(",")
    return Vault(tuple(key.strip() for key in given if key.strip()))
