"""Keyed MACs for capability tokens (leases, callback URLs): unguessable, and nothing to store or look up.

The first key signs; every key verifies, so that keys can be rotated without a moment when old tokens fail.
A token carries a one-byte key id next to its MAC.
"""

import base64
import hashlib
import hmac

_MAC_BYTES = 16


class SigningKey:
    """One secret; its fingerprint may be stored and shown, the secret may not."""

    __slots__ = ("_secret", "fingerprint", "id")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.fingerprint = hashlib.sha256(b"towpath signing key" + secret).hexdigest()[:16]
        """Tells keys apart without telling the key."""
        self.id = int(self.fingerprint[:2], 16)
        """One byte of the fingerprint: a hint which of the live keys signed."""

    def mac(self, purpose: bytes, message: bytes) -> bytes:
        """A 128-bit MAC, bound to its purpose, so that a token of one kind is never one of another."""
        return hmac.digest(self._secret, purpose + b"\0" + message, "sha256")[:_MAC_BYTES]


class Signer:
    """Makes and checks tokens: base64url of payload, key id and MAC. `context` is signed but not carried."""

    def __init__(self, keys: tuple[SigningKey, ...]) -> None:
        if not keys:
            raise ValueError("at least one signing key is needed")
        self.keys = keys

    def token(self, purpose: bytes, payload: bytes, context: bytes = b"") -> str:
        """A token for `payload` that only `opened` with the same purpose and context accepts."""
        key = self.keys[0]
        return _text(payload + bytes((key.id,)) + key.mac(purpose, payload + context))

    def opened(self, purpose: bytes, token: str, context: bytes = b"") -> bytes | None:
        """The payload of a genuine token, else None: forged, foreign, altered and malformed look the same."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            return None
        payload, key_id, mac = raw[: -_MAC_BYTES - 1], raw[-_MAC_BYTES - 1 : -_MAC_BYTES], raw[-_MAC_BYTES:]
        # Text of another spelling decodes to the same bytes; a token has one spelling.
        if not key_id or _text(raw) != token:
            return None
        # Two live keys may share their one byte: each that the token may mean is tried.
        genuine = [
            hmac.compare_digest(mac, key.mac(purpose, payload + context)) for key in self.keys if key.id == key_id[0]
        ]
        return payload if any(genuine) else None


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
