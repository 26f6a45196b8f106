"""Secrets of senders: written over the API, encrypted in the database, and never given back."""

import hashlib
import hmac
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from cryptography.fernet import Fernet

from app.errors import Refusal
from app.secrets.encryption import Vault, vault_of
from app.settings import Settings
from tests.build import JSON, Api, ok, problem
from tests.servers import ROOT

VALUE = "a secret that must not come back"


@pytest.fixture
def name() -> str:
    return f"s-{uuid4().hex[:12]}"


@pytest.fixture
def hook(api: Api) -> Callable[[str], str]:
    """A hook whose sender signs with a secret, as GitHub does."""

    def make(secret: str) -> str:
        url = f"/v1/hooks/h-{uuid4().hex[:12]}"
        signature = {"scheme": "github", "secret": secret}
        ok(api.client.put(url, json={"correlation": "payload.key", "signature": signature}))
        return url

    return make


def status_of(api: Api, hook: str, value: str) -> int:
    """What a delivery gets that is signed with a value."""
    body = f'{{"key": "{uuid4()}"}}'.encode()
    signature = "sha256=" + hmac.new(value.encode(), body, hashlib.sha256).hexdigest()
    headers = {"x-hub-signature-256": signature, "content-type": "application/json"}
    return api.client.post(hook, content=body, headers=headers).status_code


def put(api: Api, name: str, value: str = VALUE, **more: Any) -> JSON:
    return ok(api.client.put(f"/v1/secrets/{name}", json={"value": value, **more}))


class TestOverTheApi:
    def test_a_secret_is_set_listed_and_removed(self, api: Api, name: str) -> None:
        made = put(api, name)
        assert set(made) == {"name", "previous_until", "created_at", "updated_at"}
        assert ok(api.get(f"/v1/secrets/{name}")) == made
        assert made in ok(api.get("/v1/secrets", limit=200))["secrets"]
        assert api.client.delete(f"/v1/secrets/{name}").status_code == 204
        problem(api.get(f"/v1/secrets/{name}"), 404, "unknown-secret")
        problem(api.client.delete(f"/v1/secrets/{name}"), 404, "unknown-secret")

    def test_a_new_one_is_told_from_a_changed_one(self, api: Api, name: str) -> None:
        url, body = f"/v1/secrets/{name}", {"value": VALUE}
        assert [api.client.put(url, json=body).status_code for _ in range(2)] == [201, 200]

    def test_its_value_is_in_no_answer_no_row_and_no_log(
        self, api: Api, db: "psycopg.Connection[Any]", name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG):
            answers = [
                api.client.put(f"/v1/secrets/{name}", json={"value": VALUE}),
                api.client.put(f"/v1/secrets/{name}", json={"value": VALUE, "keep_previous_seconds": 60}),
                api.client.put(f"/v1/secrets/{name}", json={"value": VALUE, "unknown": 1}),
                api.get(f"/v1/secrets/{name}"),
                api.get("/v1/secrets"),
            ]
        assert not [answer for answer in answers if VALUE in answer.text]
        row = db.execute("SELECT s::text FROM towpath.secrets AS s WHERE name = %s", [name]).fetchone()
        assert row
        assert VALUE not in row[0]
        assert VALUE.encode().hex() not in row[0]
        assert VALUE not in caplog.text

    def test_the_previous_value_counts_for_as_long_as_said(
        self, api: Api, db: "psycopg.Connection[Any]", name: str, hook: Callable[[str], str]
    ) -> None:
        put(api, name)
        assert put(api, name, "another secret")["previous_until"] is None
        kept = put(api, name, "a third secret", keep_previous_seconds=3600)
        assert kept["previous_until"] > kept["updated_at"]
        url = hook(name)
        values = (VALUE, "another secret", "a third secret")
        assert [status_of(api, url, value) for value in values] == [403, 202, 202]
        db.execute("UPDATE towpath.secrets SET previous_until = now() - interval '1 s' WHERE name = %s", [name])
        assert [status_of(api, url, value) for value in values] == [403, 403, 202]

    def test_a_repeated_change_keeps_the_value_before_and_no_longer(
        self, api: Api, name: str, hook: Callable[[str], str]
    ) -> None:
        put(api, name)
        first = put(api, name, "another secret", keep_previous_seconds=3600)
        assert put(api, name, "another secret", keep_previous_seconds=3600)["previous_until"] == first["previous_until"]
        assert put(api, name, "another secret", keep_previous_seconds=7200)["previous_until"] == first["previous_until"]
        assert put(api, name, "another secret", keep_previous_seconds=60)["previous_until"] < first["previous_until"]
        url = hook(name)
        assert [status_of(api, url, value) for value in (VALUE, "another secret")] == [202, 202]
        assert put(api, name, "another secret")["previous_until"] is None
        assert [status_of(api, url, value) for value in (VALUE, "another secret")] == [403, 202]

    def test_a_repeat_makes_nothing_previous_where_nothing_was(self, api: Api, name: str) -> None:
        put(api, name, keep_previous_seconds=3600)
        assert put(api, name, keep_previous_seconds=3600)["previous_until"] is None

    def test_one_of_another_encryption_key_says_so_and_can_be_replaced(
        self, api: Api, db: "psycopg.Connection[Any]", name: str, hook: Callable[[str], str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        put(api, name)
        url = hook(name)
        sealed = Vault((Fernet.generate_key().decode(),)).seal(VALUE)
        db.execute("UPDATE towpath.secrets SET value = %s WHERE name = %s", [sealed, name])
        with caplog.at_level(logging.DEBUG):
            kept = {"value": "another secret", "keep_previous_seconds": 60}
            refused = problem(api.client.put(f"/v1/secrets/{name}", json=kept), 503, "secret-unreadable")
            assert status_of(api, url, VALUE) == 503
        for text in (VALUE, sealed.decode()):
            assert text not in str(refused) + caplog.text
        put(api, name, "another secret")
        assert status_of(api, url, "another secret") == 202

    @pytest.mark.parametrize("bad", [".a", "a%20b", "a%0A", "%00", "x" * 101, "%C3%A9"])
    def test_a_bad_name_is_refused(self, api: Api, bad: str) -> None:
        assert api.client.put(f"/v1/secrets/{bad}", json={"value": VALUE}).status_code == 422

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({}, "/value"),
            ({"value": "short"}, "/value"),
            ({"value": "x" * 5000}, "/value"),
            ({"value": VALUE, "keep_previous_seconds": -1}, "/keep_previous_seconds"),
            ({"value": VALUE, "other": 1}, "/other"),
        ],
    )
    def test_a_bad_one_is_refused_with_where(self, api: Api, name: str, body: JSON, pointer: str) -> None:
        refused = problem(api.client.put(f"/v1/secrets/{name}", json=body), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == pointer

    def test_pages_are_in_order_of_names(self, api: Api) -> None:
        names = sorted(f"page-{uuid4().hex[:8]}" for _ in range(5))
        for each in names:
            put(api, each)
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = ok(api.get("/v1/secrets", limit=2, **cursor))
            seen += [secret["name"] for secret in page["secrets"]]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert [each for each in seen if each.startswith("page-")] == names
        assert seen == sorted(seen)


class TestEncryption:
    def test_what_is_sealed_can_be_opened(self) -> None:
        vault = Vault((Fernet.generate_key().decode(),))
        assert vault.open(vault.seal(VALUE)) == VALUE
        assert vault.seal(VALUE) != vault.seal(VALUE)

    def test_an_older_key_opens_and_the_first_one_seals(self) -> None:
        old, new = (Fernet.generate_key().decode() for _ in range(2))
        sealed = Vault((old,)).seal(VALUE)
        both = Vault((new, old))
        assert both.open(sealed) == VALUE
        assert Vault((new,)).open(both.resealed(sealed)) == VALUE

    def test_another_key_opens_nothing_and_says_so(self) -> None:
        vaults = [Vault((Fernet.generate_key().decode(),)) for _ in range(2)]
        with pytest.raises(Refusal) as refused:
            vaults[0].open(vaults[1].seal(VALUE))
        assert refused.value.code == "secret-unreadable"

    @pytest.mark.parametrize("key", ["short", "not base64 at all, but as long as a key is", "A" * 44])
    def test_what_is_no_key_is_refused_without_showing_it(self, key: str) -> None:
        with pytest.raises(ValueError, match="44 characters") as refused:
            Vault((key,))
        assert key not in str(refused.value)

    def test_a_key_is_made_once_and_kept_for_its_owner_alone(self, tmp_path: Path) -> None:
        settings = Settings(data_directory=tmp_path)
        sealed = vault_of(settings).seal(VALUE)
        assert vault_of(settings).open(sealed) == VALUE
        assert (tmp_path / "encryption-key").stat().st_mode & 0o777 == 0o600


def test_a_new_key_takes_over_by_resealing(new_settings: Callable[..., Settings]) -> None:
    old, new = (Fernet.generate_key().decode() for _ in range(2))
    settings = new_settings()
    with psycopg.connect(settings.database_url, autocommit=True) as db:
        db.execute("INSERT INTO towpath.secrets (name, value) VALUES ('s', %s)", [Vault((old,)).seal(VALUE)])

        def reseal(keys: str) -> "subprocess.CompletedProcess[str]":
            environment = {
                **os.environ,
                "TOWPATH_DATABASE_URL": settings.database_url,
                "TOWPATH_ENCRYPTION_KEYS": keys,
            }
            command = [sys.executable, "-m", "app", "reseal"]
            return subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
            )

        assert reseal(new).returncode == 1
        done = reseal(f"{new},{old}")
        assert (done.returncode, done.stdout) == (0, "Secrets encrypted with the first key: 1\n")
        row = db.execute("SELECT value FROM towpath.secrets").fetchone()
        assert row
        assert Vault((new,)).open(row[0]) == VALUE
