"""Encrypt every stored secret anew with the first key, so that the old key can be taken away."""

from app.database import engine
from app.secrets.encryption import vault_of
from app.secrets.operations import reseal_all
from app.settings import Settings


async def reseal() -> int:
    """How many secrets there are. Raises ValueError: a key is none; Refusal: a secret is of a key that is not given."""
    settings = Settings()
    vault = vault_of(settings)
    async with engine.opened(settings) as database:
        return await reseal_all(database, vault)
