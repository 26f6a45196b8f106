"""Over real HTTP: a thousand altered tokens, and a thousand altered signatures, are refused and change nothing."""

import hashlib
import hmac
import json
import random
from typing import Any
from uuid import uuid4

import psycopg

from tests.build import JSON, Api, ok
from tests.callbacks.test_callbacks import stored, token_of

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
SECRET = "a secret that both sides know"


def other(dice: random.Random, text: str, alphabet: str) -> str:
    """The text with some of its characters replaced, doubled or gone."""
    changed = text
    while changed == text:
        at = dice.randrange(len(text))
        changed = dice.choice([
            text[:at] + dice.choice(alphabet) + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            "".join(dice.choice(alphabet) for _ in text),
            text[:at] + "".join(dice.choice(alphabet) for _ in text[at:]),
        ])  # fmt: skip
    return changed


def test_no_altered_token_is_taken(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job()
    before = stored(db, claimed)
    dice = random.Random(3)
    verbs = ["complete", "fail", "resume", "retry", "heartbeat"]
    statuses = set()
    for _ in range(1000):
        verb = dice.choice(verbs)
        token = other(dice, token_of(wait, verb), ALPHABET)
        statuses.add(api.client.post(f"/v1/callbacks/{token}/{verb}").status_code)
    for verb in verbs:
        for wrong in verbs:
            if wrong != verb:
                answer = api.client.post(f"/v1/callbacks/{token_of(wait, verb)}/{wrong}")
                statuses.add(answer.status_code)
    assert statuses == {404}
    assert stored(db, claimed) == before


def test_no_altered_signature_is_taken(api: Api, db: "psycopg.Connection[Any]") -> None:
    name = f"s-{uuid4().hex[:12]}"
    ok(api.client.put(f"/v1/secrets/{name}", json={"value": SECRET}))
    claimed = api.a_running_job()
    wait: JSON = api.open_wait(claimed, signature={"scheme": "github", "secret": name})
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    before = stored(db, claimed)
    dice = random.Random(4)
    # As many as a wait takes in a minute would end at 429: each goes to the hook, which takes more.
    hook = f"h-{uuid4().hex[:12]}"
    check = {"scheme": "github", "secret": name}
    ok(api.client.put(f"/v1/hooks/{hook}", json={"correlation": "payload.key", "signature": check}))
    body = json.dumps({"key": "o-1", "paid": True}).encode()
    genuine = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    statuses = []
    for n in range(1000):
        signature, sent = other(dice, genuine, "0123456789abcdef"), body
        if n % 3 == 0:
            at = dice.randrange(len(body))
            signature, sent = genuine, bytes((*body[:at], body[at] ^ 4, *body[at + 1 :]))
        url = wait["urls"]["complete"] if n % 20 == 0 else f"/v1/hooks/{hook}"
        headers = {"x-hub-signature-256": signature, "content-type": "application/octet-stream"}
        statuses.append(api.client.post(url, content=sent, headers=headers).status_code)
    assert set(statuses) == {403}
    assert stored(db, claimed) == before
    assert db.execute("SELECT count(*) FROM towpath.hook_deliveries WHERE hook = %s", [hook]).fetchone() == (0,)
