"""Lease tokens: what a worker shows to prove that the claim is its own.

Inside: the lease number, and a MAC over job id and lease number. So a lease can't be guessed, needs no column
and costs no look-up; a token of another job, or an altered one, is a lease that nobody holds.
"""

from uuid import UUID

from app.signing import Signer

_PURPOSE = b"lease"
NOBODYS = -1
"""The lease number of a token that is not genuine: it matches no row."""


def lease_token(signer: Signer, job_id: UUID, lease_number: int) -> str:
    """The token of one claim of one job."""
    return signer.token(_PURPOSE, lease_number.to_bytes(6, "big"), job_id.bytes)


def lease_number(signer: Signer, job_id: UUID, token: str) -> int:
    """The lease number inside, or `NOBODYS`."""
    payload = signer.opened(_PURPOSE, token, job_id.bytes)
    return int.from_bytes(payload, "big") if payload else NOBODYS
