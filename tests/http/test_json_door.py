"""The door: whatever JSON comes, through any body, is given back equal in value or refused as a problem, never a 5xx.

Values are compared exactly: every number is read as a decimal, so that no double hides a digit that was lost.
"""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from app.settings import Settings
from tests.build import JSON, Api, client_of, ok, problem
from tests.servers import ServiceThread

UNKNOWN = "018f0000-0000-7000-8000-000000000000"
JSON_TYPE = {"Content-Type": "application/json"}


def exact(text: str | bytes) -> Any:
    """JSON with every number as it was written."""
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def nested(depth: int) -> bytes:
    """Objects in objects, so many levels deep."""
    return b'{"in":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


KEPT: dict[str, bytes] = {
    "null": b"null",
    "the text backslash-u0000": rb'"\\u0000"',
    "the text backslash-u0000 as a key": rb'{"\\u0000": 1}',
    "the text backslash-ud800": rb'"C:\\ud800 \\\\u0000"',
    "U+FFFF": rb'"\uffff"',
    "U+FFFF as UTF-8": '"\uffff"'.encode(),
    "a 4-byte character": '"😀"'.encode(),
    "a 4-byte character as a key": '{"😀": 1}'.encode(),
    "a 4-byte character as a pair of escapes": rb'"\ud83d\ude00"',
    "escapes": rb'"\u001f\u007f\b\f\n\r\t\"\\\/"',
    "an empty key": b'{"": 1}',
    "2^53 + 1": b"9007199254740993",
    "2^63": b"9223372036854775808",
    "2^64 + 1": b"18446744073709551617",
    "a negative integer of 40 digits": b"-" + b"7" * 40,
    "an integer of 400 digits": b"9" * 400,
    "an integer of 1,000 digits": b"9" * 1000,
    "a decimal of 30 digits": b"0.123456789012345678901234567891",
    "a decimal with 30 digits on each side": b"1" * 30 + b"." + b"2" * 30,
    "a price": b"19.90",
    "-0.0": b"-0.0",
    "the largest double": b"1.7976931348623157e308",
    "a double that is almost nothing": b"4.9e-324",
    "an exponent": b"1E+2",
    "300 values next to each other": b"[" + b"[[],{}]," * 300 + b"0]",
    "a key that comes twice": b'{"a": 1, "b": 2, "a": 3}',
    "64 levels": nested(64),
    "64 levels of arrays": b"[" * 64 + b"]" * 64,
    "brackets in a text": b'"' + b"[" * 1000 + b'"',
    "brackets and quotes in a text": rb'"' + rb"\"[\\{" * 100 + b'"',
}

REFUSED: dict[str, bytes] = {
    "NaN": b"NaN",
    "NaN inside": b'{"a": [NaN]}',
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "1e400": b"1e400",
    "-1e400": b"-1e400",
    "1e400 inside": b'{"a": [1, 1e400]}',
    "1e-400": b"1e-400",
    "a NUL": rb'"\u0000"',
    "a NUL inside": rb'{"a": ["x\u0000y"]}',
    "a NUL in a key": rb'{"a\u0000b": 1}',
    "a NUL behind an escaped backslash": rb'"\\\u0000"',
    "a NUL hidden by a second key": rb'{"a": "\u0000", "a": 1}',
    "a NUL as it is": b'"a\0b"',
    "a lone high surrogate": rb'"\ud800"',
    "a lone low surrogate": rb'"\udc00"',
    "surrogates in the wrong order": rb'"\ude00\ud83d"',
    "a lone surrogate in a key": rb'{"\uD83D": 1}',
    "a surrogate as UTF-8": b'"\xed\xa0\x80"',
    "UTF-8 that is cut": b'"\xf0\x9f\x98"',
    "UTF-8 that is too long": b'"\xc0\x80"',
    "an integer of 1,001 digits": b"9" * 1001,
    "an integer of 5,000 digits": b"9" * 5000,
    "a decimal of 5,000 digits": b"0." + b"9" * 5000,
    "65 levels": nested(65),
    "65 levels of arrays": b"[" * 65 + b"]" * 65,
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "100,000 levels that do not end": b"[" * 100_000,
    "a trailing comma": b'{"a": 1,}',
    "a trailing comma in an array": b"[1,]",
    "a leading zero": b"01",
    "a plus": b"+1",
    "no digit after the point": b"1.",
    "single quotes": b"'a'",
    "a comment": b"1 /* one */",
    "a control character": b'"a\nb"',
    "an unknown escape": rb'"\x41"',
    "a text that does not end": b'"a',
    "nothing": b"",
}


# Doors for any value


@dataclass(frozen=True)
class Door:
    """One body that carries a value: `made` jobs, `send` a value for one, `read` it back exactly."""

    made: Callable[[Api, int], list[JSON]]
    send: Callable[[Api, JSON, bytes], httpx.Response]
    read: Callable[[JSON], Any]
    """The value in the job as GET tells it, numbers as decimals."""


def none_yet(_: Api, count: int) -> list[JSON]:
    """Jobs that the sending itself makes."""
    return [{} for _ in range(count)]


def running(api: Api, count: int) -> list[JSON]:
    """Claimed jobs."""
    api.enqueue_many(count)
    return api.claims(limit=count)["jobs"]  # type: ignore[no-any-return]


def with_waits(api: Api, count: int) -> list[JSON]:
    """Claimed jobs, each with a wait."""
    return [{**job, **api.open_wait(job)} for job in running(api, count)]


def post(api: Api, path: str, body: bytes) -> httpx.Response:
    """A body as it is."""
    return api.client.post(path, content=body, headers=JSON_TYPE)


def enqueue(field: bytes) -> Callable[[Api, JSON, bytes], httpx.Response]:
    def send(api: Api, job: JSON, value: bytes) -> httpx.Response:
        answer = post(api, "/v1/jobs", b'{"kind":"work","queue":"%s",%s}' % (api.queue.encode(), field % value))
        job |= answer.json() if answer.is_success else {}
        return answer

    return send


def enqueue_batch(api: Api, job: JSON, value: bytes) -> httpx.Response:
    item = b'{"kind":"work","queue":"%s","args":%s}' % (api.queue.encode(), value)
    answer = post(api, "/v1/jobs/batch", b'{"jobs":[{"kind":"work"},%s]}' % item)
    job |= answer.json()["jobs"][1]["job"] if answer.is_success else {}
    return answer


def report(verb: str, field: bytes) -> Callable[[Api, JSON, bytes], httpx.Response]:
    def send(api: Api, job: JSON, value: bytes) -> httpx.Response:
        return post(api, f"/v1/jobs/{job['id']}/{verb}", b'{"lease":"%s",%s}' % (job["lease"].encode(), field % value))

    return send


def one_of_many(path: str, body: bytes) -> Callable[[Api, JSON, bytes], httpx.Response]:
    """A call with many items: the answer to its one item, as the single call would have given it."""

    def send(api: Api, job: JSON, value: bytes) -> httpx.Response:
        answer = post(api, path, body % (job["id"].encode(), job["lease"].encode(), value))
        items = answer.json().get("settlements") or answer.json().get("heartbeats")
        if not answer.is_success or items[0]["problem"] is None:
            return answer
        refused = items[0]["problem"]
        return httpx.Response(refused["status"], headers={"Content-Type": "application/problem+json"}, json=refused)

    return send


def callback(verb: str) -> Callable[[Api, JSON, bytes], httpx.Response]:
    return lambda api, job, value: post(api, job["urls"][verb], value)


def metadata(value: bytes) -> bytes:
    """Metadata is an object."""
    return value if value.startswith(b"{") else b'{"value":%s}' % value


DOORS: dict[str, Door] = {
    "args": Door(none_yet, enqueue(b'"args":%s'), lambda job: job["args"]),
    "args in a batch": Door(none_yet, enqueue_batch, lambda job: job["args"]),
    "metadata": Door(none_yet, enqueue(b'"metadata":%s'), lambda job: job["metadata"]),
    "result": Door(running, report("complete", b'"result":%s'), lambda job: job["result"]),
    "result, one of many": Door(
        running,
        one_of_many("/v1/settlements", b'{"settlements":[{"outcome":"complete","id":"%s","lease":"%s","result":%s}]}'),
        lambda job: job["result"],
    ),
    "error details": Door(
        running, report("fail", b'"error":{"message":"m","details":%s}'), lambda job: job["errors"][-1]["details"]
    ),
    "progress": Door(running, report("heartbeat", b'"progress":%s'), lambda job: job["progress"]),
    "checkpoint, one of many": Door(
        running,
        one_of_many("/v1/heartbeats", b'{"heartbeats":[{"id":"%s","lease":"%s","checkpoint":%s}]}'),
        lambda job: job["checkpoint"],
    ),
    "payload of a completing callback": Door(with_waits, callback("complete"), lambda job: job["waits"][0]["payload"]),
    "payload of a resuming callback": Door(
        with_waits, callback("resume"), lambda job: job["callback_results"]["callback"]["payload"]
    ),
}


def of_door(name: str, values: dict[str, bytes]) -> dict[str, bytes]:
    """The values as this door takes them."""
    if name == "metadata":
        # An object around it is one level more.
        return {each: metadata(value) for each, value in values.items() if each != "64 levels of arrays" and value}
    # No body at all is a callback without a payload.
    return {each: value for each, value in values.items() if value or not name.startswith("payload")}


@pytest.mark.parametrize("name", DOORS)
def test_a_value_is_given_back_equal(api: Api, name: str) -> None:
    door, values = DOORS[name], of_door(name, KEPT)
    for (case, value), job in zip(values.items(), door.made(api, len(values)), strict=True):
        answer = door.send(api, job, value)
        assert answer.is_success, f"{case}: {answer.status_code} {answer.text[:200]}"
        read = exact(api.get(f"/v1/jobs/{job['id']}").text)
        assert door.read(read) == exact(value), case


@pytest.mark.parametrize("name", DOORS)
def test_what_could_not_be_given_back_equal_is_refused(api: Api, name: str) -> None:
    door, values = DOORS[name], of_door(name, REFUSED)
    for (case, value), job in zip(values.items(), door.made(api, len(values)), strict=True):
        answer = door.send(api, job, value)
        assert 400 <= answer.status_code < 500, f"{case}: {answer.status_code} {answer.text[:200]}"
        told = answer.json()
        assert answer.headers["content-type"] == "application/problem+json", case
        assert {"type", "title", "status", "detail"} <= set(told), case


def test_a_claim_gives_every_stored_value_back_equal(api: Api) -> None:
    for case, value in of_door("metadata", KEPT).items():
        if len(value) > 10_000:
            continue  # five times as much is more than a body may have
        enqueue(b'"args":%b,"metadata":%b' % (value, b"%s"))(api, {}, value)
        claimed = api.claim()
        ok(report("heartbeat", b'"progress":%b,"checkpoint":%b' % (value, b"%s"))(api, claimed, value))
        wait = api.open_wait(claimed)
        ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
        ok(post(api, wait["urls"]["resume"], value))
        answer = api.post("/v1/claims", {"queues": [api.queue], "wait_seconds": 10})
        (again,) = exact(answer.text)["jobs"]
        told = [again[name] for name in ("args", "metadata", "progress", "checkpoint")]
        assert [*told, again["callback_results"]["callback"]["payload"]] == [exact(value)] * 5, case
        ok(api.settle("complete", answer.json()["jobs"][0]))


# Doors for texts


TEXT_DOORS: dict[str, tuple[Callable[[Api, JSON, bytes], httpx.Response], Callable[[JSON], Any]]] = {
    "error message": (report("fail", b'"error":{"message":%s}'), lambda job: job["errors"][-1]["message"]),
    "error kind": (report("retry", b'"error":{"message":"","kind":%s}'), lambda job: job["errors"][-1]["kind"]),
    "reason of a cancel": (report("cancel", b'"reason":%s'), lambda job: job["cancel_reason"]),
    "reason of an operator's cancel": (
        lambda api, job, value: post(api, f"/v1/jobs/{job['id']}/cancel", b'{"reason":%s}' % value),
        lambda job: job["cancel_reason"],
    ),
    "tag": (enqueue(b'"tags":[%s]'), lambda job: job["tags"][0]),
}


def claim_as(api: Api, job: JSON, value: bytes) -> httpx.Response:
    """A claim by a worker of this name."""
    body = b'{"queues":["%s"],"wait_seconds":5,"worker":%s}' % (api.queue.encode(), value)
    answer = post(api, "/v1/claims", body)
    job |= answer.json()["jobs"][0] if answer.is_success else {}
    return answer


def texts(values: dict[str, bytes], shortest: int) -> dict[str, bytes]:
    """Those that are texts, or were meant to be one."""
    return {case: value for case, value in values.items() if value.startswith(b'"') and shortest <= len(value) < 150}


@pytest.mark.parametrize("name", [*TEXT_DOORS, "worker"])
def test_a_text_is_given_back_equal(api: Api, name: str) -> None:
    send, read = TEXT_DOORS.get(name, (claim_as, lambda job: job["worker"]))
    values = texts(KEPT, 3)
    if name == "worker":
        api.enqueue_many(len(values))
    jobs = none_yet(api, len(values)) if name in ("tag", "worker") else running(api, len(values))
    for (case, value), job in zip(values.items(), jobs, strict=True):
        answer = send(api, job, value)
        assert answer.is_success, f"{case}: {answer.text}"
        assert read(api.job(job)) == json.loads(value), case


@pytest.mark.parametrize("name", [*TEXT_DOORS, "worker"])
def test_a_text_that_cannot_be_stored_is_refused(api: Api, name: str) -> None:
    send, _ = TEXT_DOORS.get(name, (claim_as, None))
    (job,) = running(api, 1)
    for case, value in (texts(REFUSED, 2) | {"a number": b"5", "an array": b"[]"}).items():
        answer = send(api, job, value)
        assert 400 <= answer.status_code < 500, f"{case}: {answer.status_code} {answer.text[:200]}"
        assert answer.headers["content-type"] == "application/problem+json", case
    assert api.job(job)["state"] == "running"


# What a refusal leaves, and what it says


def test_a_job_whose_result_was_refused_can_still_be_completed(api: Api) -> None:
    for (case, value), job in zip(REFUSED.items(), running(api, len(REFUSED)), strict=True):
        DOORS["result"].send(api, job, value)
        assert api.job(job)["state"] == "running", case
        assert ok(api.settle("complete", job, result="corrected"))["already_applied"] is False, case


def test_a_callback_whose_payload_was_refused_can_be_repeated(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    for case, value in of_door("payload", REFUSED).items():
        post(api, wait["urls"]["complete"], value)
        assert api.job(claimed)["state"] == "waiting_external", case
    ok(post(api, wait["urls"]["complete"], b'"corrected"'))
    assert api.job(claimed)["result"] == "corrected"


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        (rb'{"a":[1,{"b/c~d":"\u0000"}]}', "/args/a/1/b~1c~0d"),
        (b'{"a":[1,1e400]}', "/args/a/1"),
        (rb'{"a":{"\ud800":1}}', "/args/a"),
        (b"[%s]" % (b"9" * 1001), "/args/0"),
        (nested(65), "/args"),
    ],
    ids=["NUL", "1e400", "surrogate", "digits", "depth"],
)
def test_the_bad_value_is_named_by_its_pointer(api: Api, value: bytes, pointer: str) -> None:
    refused = problem(DOORS["args"].send(api, {}, value), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == [pointer]


def test_one_bad_result_of_many_is_told_by_itself(api: Api) -> None:
    jobs = running(api, 3)
    settlements = [
        {"outcome": "complete", "id": job["id"], "lease": job["lease"], "result": n} for n, job in enumerate(jobs)
    ]
    body = json.dumps({"settlements": settlements}).replace('"result": 1', '"result": "\\u0000"')
    answer = ok(post(api, "/v1/settlements", body.encode()))
    assert [item["status"] for item in answer["settlements"]] == [200, 422, 200]
    assert answer["settlements"][1]["problem"]["errors"][0]["pointer"].endswith("/result")
    assert [api.job(job)["state"] for job in jobs] == ["completed", "running", "completed"]


def test_one_bad_job_of_a_batch_is_told_by_itself(api: Api) -> None:
    jobs = b",".join(
        b'{"kind":"work","queue":"%s","args":%s}' % (api.queue.encode(), v) for v in (b"1", rb'"\u0000"', b"3")
    )
    answer = ok(post(api, "/v1/jobs/batch", b'{"mode":"each","jobs":[%s]}' % jobs))
    assert [item["problem"] is None for item in answer["jobs"]] == [True, False, True]
    assert [job["args"] for job in api.claims(limit=5)["jobs"]] == [1, 3]


# Whole bodies


def bodies_of(api: Api) -> dict[str, str]:
    """Every call that needs a body, as `METHOD path`, for a running job, a wait, a queue."""
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    verbs = ("heartbeat", "complete", "retry", "snooze", "park", "fail", "release", "cancel", "callbacks")
    calls = [
        ("POST", path) for path in ("/v1/jobs", "/v1/jobs/batch", "/v1/claims", "/v1/heartbeats", "/v1/settlements")
    ]
    calls += [("POST", f"/v1/jobs/{claimed['id']}/{verb}") for verb in verbs]
    calls += [("PATCH", f"/v1/jobs/{claimed['id']}"), ("PUT", f"/v1/queues/{api.queue}")]
    calls.append(("POST", urlsplit(wait["urls"]["heartbeat"]).path))
    return {path: method for method, path in calls}


NOT_A_BODY: dict[str, bytes] = {
    "a byte order mark": b'\xef\xbb\xbf{"kind":"work"}',
    "UTF-16": '{"kind":"work"}'.encode("utf-16"),
    "UTF-16 without a mark": '{"kind":1e5}'.encode("utf-16-le"),
    "bytes that look like UTF-16": b'{\x00"kind":1e5}  ',
    "UTF-8 that is none": b'{"kind":"\xff"}',
    "a trailing comma": b'{"kind":"work",}',
    "a body that is cut": b'{"kind":"wo',
    "two values": b"{}{}",
    "no JSON": b"kind=work",
    "an array": b"[]",
    "a text": b'"work"',
    "a number": b"1",
    "null": b"null",
    "100,000 levels": b"[" * 100_000,
    "objects without end": b'{"a":' * 100_000,
    "an unknown field": b'{"surprise":1}',
}


@pytest.mark.parametrize("case", NOT_A_BODY)
def test_what_is_no_body_is_refused_everywhere(api: Api, case: str) -> None:
    for path, method in bodies_of(api).items():
        answer = api.client.request(method, path, content=NOT_A_BODY[case], headers=JSON_TYPE)
        assert answer.status_code in (400, 413, 422), f"{method} {path}: {answer.status_code} {answer.text[:200]}"
        assert answer.headers["content-type"] == "application/problem+json", path


def test_no_body_is_refused_where_one_is_needed(api: Api) -> None:
    for path, method in bodies_of(api).items():
        if path.startswith("/v1/callbacks/"):
            continue
        assert api.client.request(method, path, content=b"", headers=JSON_TYPE).status_code == 400, path


def test_a_text_that_does_not_end_takes_no_longer_than_others(api: Api) -> None:
    hostile = b'{"kind":"a","args":' + b"[" * 80 + b'"' + b'\\"' * 400_000
    answer = api.client.post("/v1/jobs", content=hostile, headers=JSON_TYPE, timeout=5)
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "application/json-patch+json", "text/json", ""]
)
def test_a_body_of_another_type_is_refused_everywhere(api: Api, media_type: str) -> None:
    for path, method in bodies_of(api).items():
        answer = api.client.request(method, path, content=b'{"a":1}', headers={"Content-Type": media_type})
        assert answer.status_code == 415, f"{method} {path}: {answer.status_code} {answer.text[:200]}"
        problem(answer, 415, "unsupported-media-type")


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_json_is_taken_however_its_type_is_spelled(api: Api, media_type: str) -> None:
    body = b'{"kind":"work","queue":"%s"}' % api.queue.encode()
    assert api.client.post("/v1/jobs", content=body, headers={"Content-Type": media_type}).status_code == 201


# Sizes


@pytest.fixture(scope="module")
def small(new_settings: Callable[..., Settings]) -> Iterator[ServiceThread]:
    """A service that takes little: bodies and args of 2,000 bytes, batches of 4,000."""
    with ServiceThread(new_settings(max_body_bytes=2000, max_batch_body_bytes=4000)) as running_service:
        yield running_service


@pytest.fixture
def tight(small: ServiceThread, queue: str) -> Iterator[Api]:
    """Its API."""
    with client_of(small.url) as client:
        yield Api(client, queue)


def filled(body: bytes, size: int) -> bytes:
    """The body with its `%s` replaced by as much text as makes it exactly so large."""
    return body % (b"x" * (size - len(body) + 2))


def sent_whole(api: Api, path: str, body: bytes) -> httpx.Response:
    return post(api, path, body)


def sent_in_chunks(api: Api, path: str, body: bytes) -> httpx.Response:
    return api.client.post(path, content=(body[n : n + 500] for n in range(0, len(body), 500)), headers=JSON_TYPE)


BOTH_WAYS = pytest.mark.parametrize("send", [sent_whole, sent_in_chunks], ids=["whole", "in chunks"])


@BOTH_WAYS
def test_a_report_may_be_exactly_as_large_as_the_limit(tight: Api, send: Any) -> None:
    claimed = tight.a_running_job()
    path, body = f"/v1/jobs/{claimed['id']}/complete", b'{"lease":"%s","result":"%%s"}' % claimed["lease"].encode()
    assert problem(send(tight, path, filled(body, 2001)), 413, "too-large")["limit"] == 2000
    ok(send(tight, path, filled(body, 2000)))


@BOTH_WAYS
def test_a_callback_may_be_exactly_as_large_as_the_limit(tight: Api, send: Any) -> None:
    _, wait = tight.a_parked_job()
    assert problem(send(tight, wait["urls"]["complete"], filled(b'"%s"', 2001)), 413, "too-large")["limit"] == 2000
    ok(send(tight, wait["urls"]["complete"], filled(b'"%s"', 2000)))


@BOTH_WAYS
def test_args_may_be_exactly_as_large_as_the_limit(tight: Api, send: Any) -> None:
    body = b'{"kind":"work","queue":"%s","args":%%s}' % tight.queue.encode()
    refused = problem(send(tight, "/v1/jobs", body % filled(b'"%s"', 2001)), 413, "too-large")
    assert (refused["limit"], refused["pointer"]) == (2000, "/args")
    ok(send(tight, "/v1/jobs", body % filled(b'"%s"', 2000)))


@BOTH_WAYS
def test_a_batch_may_be_exactly_as_large_as_its_own_limit(tight: Api, send: Any) -> None:
    job = b'{"kind":"work","queue":"%s","args":"%%s"}' % tight.queue.encode()
    body = b'{"jobs":[%s,%s,%s]}' % (filled(job, 1500), filled(job, 1500), job)
    assert problem(send(tight, "/v1/jobs/batch", filled(body, 4001)), 413, "too-large")["limit"] == 4000
    ok(send(tight, "/v1/jobs/batch", filled(body, 4000)))


@BOTH_WAYS
def test_a_plain_route_has_the_same_limit(tight: Api, send: Any) -> None:
    claimed = tight.a_running_job()
    path, body = f"/v1/jobs/{claimed['id']}/callbacks", b'{"lease":"%s"}' % claimed["lease"].encode()
    assert problem(send(tight, path, body.ljust(2001)), 413, "too-large")["limit"] == 2000
    ok(send(tight, path, body.ljust(2000)))


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/batch", "/v1/claims", f"/v1/jobs/{UNKNOWN}/callbacks"])
def test_a_body_that_is_declared_too_large_is_refused_before_it_comes(service: ServiceThread, path: str) -> None:
    where = urlsplit(service.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_key_may_be_almost_as_large_as_a_body(api: Api) -> None:
    large = {"k" * 1_040_000: 1}
    claimed = api.a_running_job(args=large)
    ok(api.settle("complete", claimed, result=large))
    job = api.job(claimed)
    assert (claimed["args"], job["args"], job["result"]) == (large, large, large)


def test_a_large_value_is_one_of_many_that_fit(api: Api) -> None:
    large = "x" * 1_000_000
    jobs = [{"kind": "work", "queue": api.queue, "args": large} for _ in range(5)]
    ok(api.post("/v1/jobs/batch", {"jobs": jobs}))
    assert {len(job["args"]) for job in api.claims(limit=5)["jobs"]} == {1_000_000}


# Where there is nothing, or not so


REFUSALS: list[tuple[str, str, int, str]] = [
    ("GET", "/nothing", 404, "not-found"),
    ("GET", "/v1", 404, "not-found"),
    ("GET", "/v1/jobs/", 404, "not-found"),
    ("POST", "/v1/jobs/", 404, "not-found"),
    ("GET", f"/v1/jobs/{UNKNOWN}/nothing", 404, "not-found"),
    ("PUT", "/v1/jobs", 405, "method-not-allowed"),
    ("GET", "/v1/claims", 405, "method-not-allowed"),
    ("DELETE", f"/v1/jobs/{UNKNOWN}", 405, "method-not-allowed"),
    ("GET", f"/v1/jobs/{UNKNOWN}/complete", 405, "method-not-allowed"),
    ("POST", "/livez", 405, "method-not-allowed"),
    ("GET", "/v1/jobs/not-an-id", 404, "unknown-job"),
    ("GET", "/v1/jobs/%00", 404, "unknown-job"),
    ("GET", "/v1/jobs/%ed%a0%80", 404, "unknown-job"),
    ("POST", "/v1/jobs/not-an-id/complete", 404, "unknown-job"),
    ("POST", "/v1/jobs/not-an-id/redrive", 404, "unknown-job"),
    ("GET", "/v1/dead-letters/not-an-id", 404, "unknown-job"),
    ("GET", f"/v1/jobs/{UNKNOWN}/callbacks/not-an-id", 422, "invalid-field"),
    ("GET", "/v1/queues/no%20name", 422, "invalid-field"),
    ("POST", "/v1/queues/%00/pause", 422, "invalid-field"),
    ("GET", "/v1/callbacks/not-a-token", 404, "unknown-callback"),
    ("GET", f"/v1/callbacks/{'x' * 201}", 422, "invalid-field"),
    ("GET", "/v1/jobs?limit=0", 422, "invalid-field"),
    ("GET", "/v1/jobs?limit=201", 422, "invalid-field"),
    ("GET", "/v1/jobs?limit=many", 422, "invalid-field"),
    ("GET", "/v1/jobs?state=lost", 422, "invalid-field"),
    ("GET", "/v1/jobs?queue=%00", 422, "invalid-field"),
    ("GET", "/v1/jobs?tag=%00", 422, "invalid-field"),
    ("GET", f"/v1/jobs?queue={'q' * 101}", 422, "invalid-field"),
    ("GET", "/v1/jobs?cursor=nonsense", 422, "invalid-field"),
    ("GET", "/v1/jobs?cursor=%C3%A9", 422, "invalid-field"),
    ("GET", f"/v1/jobs?cursor={'A' * 201}", 422, "invalid-field"),
    ("GET", "/v1/queues?cursor=AAAA", 422, "invalid-field"),
    ("GET", "/v1/dead-letters?cursor=nonsense", 422, "invalid-field"),
    ("GET", f"/v1/jobs/{UNKNOWN}?wait_seconds=61", 422, "invalid-field"),
    ("GET", f"/v1/jobs/{UNKNOWN}?wait_seconds=nan", 422, "invalid-field"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), REFUSALS, ids=lambda value: str(value)[:40])
def test_every_refusal_is_a_problem_document(api: Api, method: str, path: str, status: int, code: str) -> None:
    answer = api.client.request(method, path, **({"json": {"lease": "x"}} if method == "POST" else {}))
    told = problem(answer, status, code)
    assert all(told[member] for member in ("type", "title", "status", "detail"))
    assert answer.headers["x-request-id"]
