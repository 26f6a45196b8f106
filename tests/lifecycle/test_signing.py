"""Tokens: genuine under any live key, worthless otherwise."""

from itertools import count

from app.signing import Signer, SigningKey


def test_an_old_keys_tokens_stay_good_though_the_new_key_has_the_same_id() -> None:
    old = SigningKey(b"old")
    twin = next(key for n in count() if (key := SigningKey(f"new {n}".encode())).id == old.id)
    token = Signer((old,)).token(b"lease", b"payload", b"job")
    assert Signer((twin, old)).opened(b"lease", token, b"job") == b"payload"
    assert Signer((twin,)).opened(b"lease", token, b"job") is None
