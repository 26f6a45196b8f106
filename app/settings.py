"""Every setting, typed, with its unit in its name. Read from `TOWPATH_…` in the environment."""

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """How one process runs. Made in a factory, never at import, so that two can live in one test."""

    model_config = SettingsConfigDict(env_prefix="TOWPATH_", frozen=True, extra="ignore")

    database_url: str = Field("postgresql://localhost/towpath", description="PostgreSQL 15–18, as a libpq URL.")
    data_directory: Path = Field(
        Path(".towpath"), description="The embedded server's data, and the signing key when none is given."
    )
    signing_keys: SecretStr | None = Field(
        None,
        description=(
            "Keys for lease tokens and callback URLs, comma-separated, at least 32 characters each: the first "
            "signs, all verify. Every process of one database needs the same. Default: a key made on first start "
            "and kept in the data directory."
        ),
    )
    encryption_keys: SecretStr | None = Field(
        None,
        description=(
            "Fernet keys for senders' secrets, comma-separated: the first encrypts, all decrypt. Every process of one "
            "database needs the same. Default: a key made on first start and kept in the data directory."
        ),
    )
    public_url: str | None = Field(
        None, description="What callback URLs start with. Default: the address that the worker called."
    )

    max_body_bytes: int = Field(1_048_576, ge=1024, description="Largest request body, and largest `args`.")
    max_batch_body_bytes: int = Field(33_554_432, ge=1024, description="Largest body of the batch calls.")
    max_waiting_polls: int = Field(20_000, ge=1, description="Most long polls of one process; then 429.")
    max_queued_items: int = Field(20_000, ge=1, description="Most items that wait for a flush; then 429.")
    request_deadline_seconds: float = Field(15.0, gt=0, description="Every request but a long poll ends by then.")
    idempotency_seconds: float = Field(86_400.0, ge=60, description="How long an Idempotency-Key is remembered.")

    callbacks_per_minute: int = Field(120, ge=1, description="Most callbacks of one wait, each process; then 429.")
    deliveries_per_minute: int = Field(12_000, ge=1, description="Most deliveries to one hook, each process; then 429.")
    refusals_per_minute: int = Field(
        600, ge=1, description="Most refused callbacks and deliveries of one address, each process; then 429."
    )

    policy_seconds: float = Field(1.0, gt=0, description="Longest evaluation of a policy or of a hook's expressions.")

    hot_connections: int = Field(6, ge=3, description="Connections for the hot path, each process.")
    pool_connections: int = Field(4, ge=1, description="Connections for everything else, each process.")
    statement_timeout_seconds: float = Field(10.0, gt=0, description="Longest statement of a request.")
    lock_timeout_seconds: float = Field(1.0, gt=0, description="Longest wait for a row lock.")

    safety_poll_seconds: float = Field(5.0, gt=0, description="Longest that a missed notification can delay a poll.")
    rescue_interval_seconds: float = Field(0.5, gt=0, description="How often lost leases are looked for.")
    sweep_interval_seconds: float = Field(5.0, gt=0, description="Longest sleep of the other sweeps.")
    sweep_batch: int = Field(500, ge=1, description="Jobs per step of a sweep.")

    log_json: bool = Field(False, description="JSON lines instead of columns.")
