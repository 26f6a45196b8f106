"""Keyed MACs for capability tokens (leases, callback URLs): unguessable, and nothing to store or look up.

The first key signs; every key verifies, so that keys can be rotated without a moment when old tokens fail.
A token carries a one-byte key id next to its MAC, which is BLAKE2s with a key (RFC 7693): a fifth of what an HMAC
costs here, and a claim of a hundred jobs needs a hundred.
"""

import base64
import hashlib
import hmac

_MAC_BYTES = 16


class SigningKey:
    """One secret; its fingerprint may be stored and shown, the secret may not."""

    __slots__ = ("_keyed", "fingerprint", "id")

    def __init__(self, secret: bytes) -> None:
        self._keyed = hashlib.blake2s(key=hashlib.sha256(secret).digest(), digest_size=_MAC_BYTES)
        self.fingerprint = hashlib.sha256(b"towpath signing key" + secret).hexdigest()[:16]
        """Tells keys apart without telling the key."""
        self.id = bytes((int(self.fingerprint[:2], 16),))
        """One byte of the fingerprint: a hint which of the live keys signed."""

    def mac(self, purpose: bytes, message: bytes) -> bytes:
        """A 128-bit MAC, bound to its purpose, so that a token of one kind is never one of another."""
        keyed = self._keyed.copy()
        keyed.update(purpose + b"\0" + message)
        return keyed.digest()


class Signer:
    """Makes and checks tokens: base64url of payload, key id and MAC. `context` is signed but not carried."""

    def __init__(self, keys: tuple[SigningKey, ...]) -> None:
        if not keys:
            raise ValueError("at least one signing key is needed")
        self.keys = keys

    def token(self, purpose: bytes, payload: bytes, context: bytes = b"") -> str:
        """A token for `payload` that only `opened` with the same purpose and context accepts."""
        return _token(self.keys[0], purpose, payload, context)

    def opened(self, purpose: bytes, token: str, context: bytes = b"") -> bytes | None:
        """The payload of a genuine token, else None: forged, foreign, altered and malformed look the same."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            return None
        payload, key_id = raw[: -_MAC_BYTES - 1], raw[-_MAC_BYTES - 1 : -_MAC_BYTES]
        # Two live keys may share their one byte: each that the token may mean is tried. Texts are compared, since
        # another spelling decodes to the same bytes, and a token has one.
        for key in self.keys:
            if key.id == key_id and hmac.compare_digest(token, _token(key, purpose, payload, context)):
                return payload
        return None


def _token(key: SigningKey, purpose: bytes, payload: bytes, context: bytes) -> str:
    raw = payload + key.id + key.mac(purpose, payload + context)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
