"""A wait's own rules: policy, signature, hard deadline, rotated URLs, page for people. They hold on every path."""

import base64
import hashlib
import hmac
import re
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from tests.build import JSON, Api, ok, problem

PAYMENT = {
    "filter": "payload.type == 'payment'",
    "fail_if": "payload.status == 'declined'",
    "complete_if": "payload.status == 'paid' && payload.amount >= job.args.amount",
    "transform": "{'amount': payload.amount}",
}


def parked(api: Api, args: Any = None, **wait: Any) -> tuple[JSON, JSON]:
    claimed = api.a_running_job(args=args)
    opened = api.open_wait(claimed, timeout_seconds=60, **wait)
    ok(api.settle("park", claimed, wait_id=opened["wait_id"]))
    return claimed, opened


def call(api: Api, wait: JSON, verb: str, payload: Any = None, **headers: str) -> httpx.Response:
    return api.client.post(
        wait["urls"][verb], json=payload, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def detail(api: Api, claimed: JSON, wait: JSON) -> JSON:
    return ok(api.get(f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}"))


class TestPolicy:
    def payment(self, api: Api) -> tuple[JSON, JSON]:
        return parked(api, {"amount": 10}, policy=PAYMENT)

    @pytest.mark.parametrize(
        ("status", "amount", "becomes"),
        [("paid", 10, "completed"), ("declined", 10, "failed"), ("paid", 9, "available"), ("pending", 10, "available")],
    )
    def test_it_decides_by_payload_and_job(self, api: Api, status: str, amount: int, becomes: str) -> None:
        claimed, wait = self.payment(api)
        answer = ok(call(api, wait, "default", {"type": "payment", "status": status, "amount": amount}))
        assert answer["job_state"] == becomes

    def test_what_it_makes_of_the_payload_is_the_result(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        ok(call(api, wait, "default", {"type": "payment", "status": "paid", "amount": 12, "noise": 1}))
        assert api.job(claimed)["result"] == {"amount": 12}

    def test_what_the_filter_is_false_for_is_ignored_and_kept_to_be_seen(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        answer = ok(call(api, wait, "default", {"type": "refund"}))
        assert (answer["ignored"], answer["resolved_as"], answer["job_state"]) == (True, None, "waiting_external")
        seen = detail(api, claimed, wait)
        assert seen["state"] == "open"
        (kept,) = seen["refused"]
        assert base64.b64decode(kept["body_base64"]) == b'{"type":"refund"}'

    def test_what_it_cannot_decide_is_refused_and_kept_and_the_job_stays_parked(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        refused = problem(call(api, wait, "default", {"type": "payment"}), 422, "policy-failed")
        assert refused["expression"] == "fail_if"
        seen = detail(api, claimed, wait)
        assert (seen["state"], seen["job_state"], len(seen["refused"])) == ("open", "waiting_external", 1)
        ok(call(api, wait, "default", {"type": "payment", "status": "paid", "amount": 10}))

    def test_only_the_newest_of_what_it_refused_are_kept(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        for n in range(13):
            problem(call(api, wait, "default", {"type": "payment", "n": n}), 422, "policy-failed")
        kept = [base64.b64decode(each["body_base64"]) for each in detail(api, claimed, wait)["refused"]]
        assert kept == [b'{"type":"payment","n":%d}' % n for n in range(3, 13)]

    def test_a_verb_url_does_not_get_around_it(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        declined = {"type": "payment", "status": "declined", "amount": 10}
        refused = problem(call(api, wait, "complete", declined), 409, "policy-disagrees")
        assert (refused["decided"], refused["wait_state"]) == ("fail", "open")
        assert api.job(claimed)["state"] == "waiting_external"
        assert ok(call(api, wait, "fail", declined))["job_state"] == "failed"

    def test_a_repeat_is_told_the_recorded_outcome(self, api: Api) -> None:
        claimed, wait = self.payment(api)
        paid = {"type": "payment", "status": "paid", "amount": 10}
        ok(call(api, wait, "default", paid))
        again = ok(call(api, wait, "default", paid))
        assert (again["already_applied"], again["resolved_as"]) == (True, "complete")
        problem(call(api, wait, "default", {**paid, "amount": 11}), 409, "callback-conflict")

    def test_it_holds_for_an_early_callback(self, api: Api) -> None:
        claimed = api.a_running_job(args={"amount": 10})
        wait = api.open_wait(claimed, policy=PAYMENT)
        assert ok(call(api, wait, "default", {"type": "refund"}))["ignored"] is True
        problem(call(api, wait, "default", {"type": "payment"}), 422, "policy-failed")
        early = ok(call(api, wait, "default", {"type": "payment", "status": "paid", "amount": 10}))
        assert (early["early"], early["resolved_as"]) == (True, "complete")
        assert ok(api.settle("park", claimed, wait_id=wait["wait_id"]))["state"] == "completed"

    @pytest.mark.parametrize(
        ("policy", "pointer"),
        [
            ({"filter": "payload.type =="}, "/policy/filter"),
            ({"complete_if": "payloa.type == 'x'"}, "/policy/complete_if"),
            ({"fail_if": "1 + 1"}, "/policy/fail_if"),
            ({"transform": "unknown(payload)"}, "/policy/transform"),
        ],
    )
    def test_an_expression_that_does_not_compile_opens_no_wait(self, api: Api, policy: JSON, pointer: str) -> None:
        claimed = api.a_running_job()
        body = {"lease": claimed["lease"], "policy": policy}
        refused = problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == pointer
        assert re.search(r"line \d+, column \d+|must be", refused["detail"])
        assert api.job(claimed)["waits"] == []


class TestSignature:
    @pytest.fixture
    def secret(self, api: Api) -> str:
        name = f"s-{uuid4().hex[:12]}"
        ok(api.client.put(f"/v1/secrets/{name}", json={"value": "a shared secret"}))
        return name

    def signed(self, body: bytes, secret: str = "a shared secret") -> dict[str, str]:
        digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        return {"x-hub-signature-256": f"sha256={digest}", "content-type": "application/json"}

    def test_what_its_sender_signed_counts(self, api: Api, secret: str) -> None:
        _, wait = parked(api, signature={"scheme": "github", "secret": secret})
        body = b'{"paid": true}'
        answer = ok(api.client.post(wait["urls"]["complete"], content=body, headers=self.signed(body)))
        assert answer["job_state"] == "completed"

    @pytest.mark.parametrize("flaw", ["unsigned", "other secret", "other body"])
    def test_what_is_not_signed_changes_nothing(self, api: Api, secret: str, flaw: str) -> None:
        claimed, wait = parked(api, signature={"scheme": "github", "secret": secret})
        body = b'{"paid": true}'
        headers = {
            "unsigned": {"content-type": "application/json"},
            "other secret": self.signed(body, "another secret"),
            "other body": self.signed(b'{"paid": false}'),
        }[flaw]
        refused = api.client.post(wait["urls"]["complete"], content=body, headers=headers)
        problem(refused, 403, "signature-refused")
        assert "shared" not in refused.text
        seen = detail(api, claimed, wait)
        assert (seen["state"], seen["job_state"], seen["refused"]) == ("open", "waiting_external", [])

    def test_both_secrets_count_while_they_are_changed(self, api: Api, secret: str) -> None:
        for verb, value in (("complete", "a shared secret"), ("complete", "the new secret")):
            _, wait = parked(api, signature={"scheme": "github", "secret": secret})
            ok(
                api.client.put(f"/v1/secrets/{secret}", json={"value": "the new secret", "keep_previous_seconds": 3600})
            ) if value == "a shared secret" else None
            ok(api.client.post(wait["urls"][verb], content=b"{}", headers=self.signed(b"{}", value)))

    def test_a_secret_that_is_not_there_opens_no_wait(self, api: Api) -> None:
        claimed = api.a_running_job()
        body = {"lease": claimed["lease"], "signature": {"scheme": "github", "secret": "nobody-made-it"}}
        refused = problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == "/signature/secret"

    def test_a_secret_that_went_away_lets_nobody_in(self, api: Api, secret: str) -> None:
        _, wait = parked(api, signature={"scheme": "github", "secret": secret})
        assert api.client.delete(f"/v1/secrets/{secret}").status_code == 204
        refused = api.client.post(wait["urls"]["complete"], content=b"{}", headers=self.signed(b"{}"))
        problem(refused, 403, "signature-refused")


class TestPayloads:
    def send(self, api: Api, body: bytes, content_type: str | None, **headers: str) -> tuple[JSON, httpx.Response]:
        claimed, wait = parked(api)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content_type:
            named["content-type"] = content_type
        answer = api.client.post(wait["urls"]["resume"], content=body, headers=named)
        return {"claimed": claimed, **wait}, answer

    @pytest.mark.parametrize(
        ("content_type", "body", "payload", "encoding"),
        [
            ("application/json", b'{"a": [1, 2.50]}', {"a": [1, 2.5]}, "json"),
            ("application/vnd.acme+json", b"[true]", [True], "json"),
            ("application/x-www-form-urlencoded", b"a=1&b=x+y&b=z", {"a": "1", "b": ["x y", "z"]}, "form"),
            ("text/plain; charset=iso-8859-1", "grün".encode("latin-1"), "grün", "text"),
            ("image/png", b"\x89PNG\x00", base64.b64encode(b"\x89PNG\x00").decode(), "base64"),
            (None, b"\x00\x01", base64.b64encode(b"\x00\x01").decode(), "base64"),
            (None, b"", None, "none"),
        ],
    )
    def test_anything_is_a_payload(
        self, api: Api, content_type: str | None, body: bytes, payload: Any, encoding: str
    ) -> None:
        wait, answer = self.send(api, body, content_type)
        ok(answer)
        came = api.claim()["callback_results"]["callback"]
        assert (came["payload"], came["encoding"], came["content_type"]) == (payload, encoding, content_type)

    def test_the_bytes_are_kept_as_they_came(self, api: Api) -> None:
        body = b'{ "a" : 1.00 }\n'
        wait, answer = self.send(api, body, "application/json")
        ok(answer)
        kept = api.get(f"/v1/jobs/{wait['claimed']['id']}/callbacks/{wait['wait_id']}/body")
        assert kept.content == body
        assert kept.headers["content-type"] == "application/octet-stream"

    def test_a_structured_cloud_event_is_its_data(self, api: Api) -> None:
        event = b'{"specversion":"1.0","id":"7","source":"/shop","type":"paid","data":{"amount":3}}'
        _, answer = self.send(api, event, "application/cloudevents+json")
        ok(answer)
        came = api.claim()["callback_results"]["callback"]
        assert came["payload"] == {"amount": 3}
        assert (came["event"]["id"], came["event"]["source"], came["event"]["type"]) == ("7", "/shop", "paid")

    def test_a_binary_cloud_event_is_its_body(self, api: Api) -> None:
        _, answer = self.send(
            api, b'{"amount":3}', "application/json", ce_specversion="1.0", ce_id="7", ce_source="/shop", ce_type="paid"
        )
        ok(answer)
        came = api.claim()["callback_results"]["callback"]
        assert (came["payload"], came["event"]["type"]) == ({"amount": 3}, "paid")

    @pytest.mark.parametrize(
        ("content_type", "body", "status"),
        [
            ("application/json", b"{", 400),
            ("application/json", b'"\\u0000"', 422),
            ("application/json", b"[" * 100 + b"]" * 100, 422),
            ("text/plain", b"\xff\xfe\xfa", 400),
            ("text/plain; charset=zip", b"x", 400),
            ("application/x-www-form-urlencoded", b"a=%00", 422),
            ("application/cloudevents+json", b'{"specversion":"1.0"}', 422),
            ("application/cloudevents-batch+json", b"[]", 415),
        ],
    )
    def test_a_malformed_body_leaves_the_job_as_it_was(
        self, api: Api, content_type: str, body: bytes, status: int
    ) -> None:
        wait, answer = self.send(api, body, content_type)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        seen = api.job(wait["claimed"])
        assert (seen["state"], seen["waits"][0]["state"], seen["callback_results"]) == ("waiting_external", "open", {})


class TestDeadlines:
    def test_a_heartbeat_never_goes_beyond_the_hard_limit(self, api: Api) -> None:
        claimed = api.a_running_job()
        wait = api.open_wait(claimed, timeout_seconds=60, max_timeout_seconds=90)
        beaten = ok(api.client.post(wait["urls"]["heartbeat"], json={"timeout_seconds": 3600}))
        assert beaten["deadline_at"] == beaten["hard_deadline_at"] == wait["hard_deadline_at"]

    def test_without_one_it_may_go_on(self, api: Api) -> None:
        wait = api.open_wait(api.a_running_job(), timeout_seconds=60)
        beaten = ok(api.client.post(wait["urls"]["heartbeat"], json={"timeout_seconds": 3600}))
        assert beaten["deadline_at"] > wait["deadline_at"]
        assert beaten["hard_deadline_at"] is None

    def test_a_hard_limit_below_the_time_out_is_refused(self, api: Api) -> None:
        claimed = api.a_running_job()
        body = {"lease": claimed["lease"], "timeout_seconds": 60, "max_timeout_seconds": 59}
        refused = problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == "/max_timeout_seconds"


class TestUrls:
    VERBS = ("default", "complete", "fail", "resume", "retry", "heartbeat")

    def path(self, claimed: JSON, wait: JSON, verb: str) -> str:
        return f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}/{verb}"

    def test_rotated_urls_replace_the_old_ones(self, api: Api) -> None:
        claimed, wait = parked(api)
        new = ok(api.post(self.path(claimed, wait, "rotate")))
        for verb in self.VERBS:
            problem(api.client.post(wait["urls"][verb]), 404, "unknown-callback")
        problem(api.client.get(wait["urls"]["status"]), 404, "unknown-callback")
        assert ok(api.client.get(new["urls"]["status"]))["state"] == "open"
        assert ok(api.client.post(new["urls"]["complete"]))["job_state"] == "completed"

    def test_revoked_urls_are_unknown_and_the_wait_goes_on(self, api: Api) -> None:
        claimed, wait = parked(api)
        assert api.post(self.path(claimed, wait, "revoke")).status_code == 204
        problem(api.client.post(wait["urls"]["complete"]), 404, "unknown-callback")
        assert detail(api, claimed, wait)["state"] == "open"

    @pytest.mark.parametrize("verb", ["rotate", "revoke"])
    def test_a_wait_that_is_over_has_no_urls_to_change(self, api: Api, verb: str) -> None:
        claimed, wait = parked(api)
        ok(call(api, wait, "complete"))
        problem(api.post(self.path(claimed, wait, verb)), 409, "wait-not-open")
        problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks/{uuid4()}/{verb}"), 404, "unknown-wait")

    def test_what_is_parked_is_listed_with_since_when(self, api: Api) -> None:
        jobs = [parked(api) for _ in range(3)]
        api.a_running_job()
        page = ok(api.get("/v1/waits", queue=api.queue, limit=2))
        rest = ok(api.get("/v1/waits", queue=api.queue, limit=2, cursor=page["next_cursor"]))
        waits = page["waits"] + rest["waits"]
        assert [wait["job_id"] for wait in waits] == [claimed["id"] for claimed, _ in jobs]
        assert all(wait["parked_at"] for wait in waits)
        assert rest["next_cursor"] is None


class TestPageForPeople:
    PAGE = {"title": "Pay <b>5</b> €?", "text": "For & by\n\nAda <script>", "button": "Approve"}
    BROWSER = {"accept": "text/html,application/xhtml+xml;q=0.9"}

    def test_pressing_the_link_changes_nothing(self, api: Api) -> None:
        claimed, wait = parked(api, confirm=self.PAGE)
        for _ in range(3):
            page = api.client.get(wait["urls"]["complete"], headers=self.BROWSER)
            assert page.status_code == 200
        assert detail(api, claimed, wait)["state"] == "open"

    def test_it_is_escaped_and_has_no_script(self, api: Api) -> None:
        _, wait = parked(api, confirm=self.PAGE)
        page = api.client.get(wait["urls"]["complete"], headers=self.BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "<script" not in page.text
        assert "Pay &lt;b&gt;5&lt;/b&gt; €?" in page.text
        assert "script-src" not in page.headers["content-security-policy"]
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert page.headers["referrer-policy"] == "no-referrer"

    def test_its_button_posts_to_the_same_address(self, api: Api) -> None:
        claimed, wait = parked(api, confirm=self.PAGE)
        page = api.client.get(wait["urls"]["complete"], headers=self.BROWSER)
        assert re.search(r'<form method="post"><button>Approve</button></form>', page.text)
        form = {**self.BROWSER, "content-type": "application/x-www-form-urlencoded"}
        done = api.client.post(wait["urls"]["complete"], content=b"", headers=form)
        assert "Recorded." in done.text
        assert api.job(claimed)["state"] == "completed"

    def test_a_second_press_and_a_late_one_are_told_in_words(self, api: Api) -> None:
        _, wait = parked(api, confirm=self.PAGE)
        form = {**self.BROWSER, "content-type": "application/x-www-form-urlencoded"}
        for said in ("Recorded.", "This was recorded before."):
            assert said in api.client.post(wait["urls"]["complete"], content=b"", headers=form).text
        other = api.client.post(wait["urls"]["fail"], content=b"", headers=form)
        assert (other.status_code, "resolved before, as complete" in other.text) == (409, True)
        assert "<form" not in api.client.get(wait["urls"]["complete"], headers=self.BROWSER).text

    def test_without_one_a_browser_gets_the_status(self, api: Api) -> None:
        _, wait = parked(api)
        assert ok(api.client.get(wait["urls"]["complete"], headers=self.BROWSER))["state"] == "open"

    def test_the_status_url_has_no_button(self, api: Api) -> None:
        _, wait = parked(api, confirm=self.PAGE)
        assert "<form" not in api.client.get(wait["urls"]["status"], headers=self.BROWSER).text


def test_a_cancelled_job_tells_later_callers_when(api: Api) -> None:
    claimed, wait = parked(api)
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {"reason": "between us"}))
    gone = problem(call(api, wait, "complete"), 410, "callback-gone")
    assert (gone["job_state"], gone["wait_state"]) == ("cancelled", "superseded")
    assert gone["cancelled_at"]
    assert "between us" not in str(gone)


def test_a_reopened_name_with_other_rules_is_refused(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    api.open_wait(claimed, policy={"filter": "true"})
    body: JSON = {"lease": claimed["lease"], "policy": {"filter": "false"}}
    problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 409, "wait-name-taken")
    assert api.open_wait(claimed, policy={"filter": "true"})["state"] == "open"
