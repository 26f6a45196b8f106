"""What a callback came with: how each media type is read, what is refused, what is kept."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.callbacks.payloads import Payload, parse
from app.errors import Kind, Refusal

FORM = "application/x-www-form-urlencoded"
EVENT = "application/cloudevents+json"
EVENT_HEADERS = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "paid"}


def came(body: bytes, content_type: str | None = None, *more: tuple[str, str]) -> Payload:
    headers = [*([("Content-Type", content_type)] if content_type is not None else []), *more]
    return parse([(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers], body)


def refusal(body: bytes, content_type: str | None = None, *more: tuple[str, str]) -> Refusal:
    with pytest.raises(Refusal) as refused:
        came(body, content_type, *more)
    return refused.value


def pointer(refused: Refusal) -> str:
    assert refused.kind is Kind.INVALID
    (error,) = refused.facts["errors"]
    return error["pointer"]


def value(payload: Payload) -> Any:
    return None if payload.value is None else json.loads(bytes(payload.value))


class TestJson:
    @pytest.mark.parametrize("content_type", ["application/json", "APPLICATION/JSON;v=1", "application/vnd.acme+json"])
    def test_it_is_the_value_as_it_was_written(self, content_type: str) -> None:
        payload = came(b'{"n":12345678901234567890,"d":1.50}', content_type)
        assert (payload.encoding, bytes(payload.value)) == ("json", b'{"n":12345678901234567890,"d":1.50}')

    @pytest.mark.parametrize("body", [b"{", b" ", b"NaN", b'"\xff"', b"1 2"])
    def test_what_is_none_is_malformed(self, body: bytes) -> None:
        assert refusal(body, "application/json").code == "malformed-json"

    @pytest.mark.parametrize(
        ("body", "where"),
        [(b'{"a":"\\u0000"}', "/a"), (b'["\\ud800"]', "/0"), (b"1e999", ""), (b"[" * 65 + b"]" * 65, "")],
        ids=["nul", "lone surrogate", "too large", "too deep"],
    )
    def test_what_cannot_be_stored_is_refused_with_where_it_is(self, body: bytes, where: str) -> None:
        assert pointer(refusal(body, "application/json")) == where


class TestForms:
    def test_it_is_an_object_of_texts_and_of_lists_where_a_name_is_repeated(self) -> None:
        payload = came("a=1&b=x+y&b=%C3%BC&b=ü&c=&d".encode(), FORM)
        assert (payload.encoding, value(payload)) == ("form", {"a": "1", "b": ["x y", "ü", "ü"], "c": "", "d": ""})

    def test_as_many_fields_as_are_allowed_are_taken_and_one_more_is_not(self) -> None:
        assert len(value(came(b"&".join([b"a=1"] * 1000), FORM))["a"]) == 1000
        assert refusal(b"&".join([b"a=1"] * 1001), FORM).code == "malformed-body"

    @pytest.mark.parametrize("body", [b"a=%ff", b"a=\xff", b"%ff=a", b"a=%ed%a0%80"])
    def test_what_is_not_utf_8_is_malformed(self, body: bytes) -> None:
        assert refusal(body, FORM).code == "malformed-body"

    @pytest.mark.parametrize(("body", "where"), [(b"a=%00", "/a"), (b"a=1&a=%00", "/a/1"), (b"%00=a", "")])
    def test_a_nul_character_is_refused_with_where_it_is(self, body: bytes, where: str) -> None:
        assert pointer(refusal(body, FORM)) == where


class TestTexts:
    @pytest.mark.parametrize("media_type", ["text/plain", "text/html", "application/xml", "application/soap+xml"])
    def test_a_text_or_xml_is_a_text(self, media_type: str) -> None:
        payload = came("<ü/>".encode(), media_type)
        assert (payload.encoding, value(payload)) == ("text", "<ü/>")

    @pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "iso-8859-1", "windows-1252", "utf-16"])
    @pytest.mark.parametrize(
        "written", ["charset={}", 'charset="{}"', 'CHARSET={}; a="; charset=zip"', 'a=";"; charset={}']
    )
    def test_it_is_read_by_its_charset(self, charset: str, written: str) -> None:
        assert value(came("grün".encode(charset), f"text/plain; {written.format(charset)}")) == "grün"

    @pytest.mark.parametrize(
        "charset", ["zip", "base64", "rot13", "idna", "unicode_escape", "utf-7", "koi8-r", "nobody-knows", ""]
    )
    def test_a_charset_that_is_not_listed_is_malformed(self, charset: str) -> None:
        refused = refusal(b"x", f"text/plain; charset={charset}")
        assert (refused.kind, refused.code) == (Kind.MALFORMED, "malformed-body")

    @pytest.mark.parametrize(
        ("body", "charset"), [(b"\xff", "utf-8"), (b"\xfc", "us-ascii"), (b"a", "utf-16"), (b"\x00\xd8", "utf-16")]
    )
    def test_bytes_of_another_charset_are_malformed(self, body: bytes, charset: str) -> None:
        assert refusal(body, f"text/plain; charset={charset}").code == "malformed-body"

    def test_a_nul_character_is_refused(self) -> None:
        assert pointer(refusal(b"a\0b", "text/plain")) == ""


class TestAnythingElse:
    @pytest.mark.parametrize(
        "content_type", [None, "", "application/octet-stream", "image/png", "multipart/form-data; boundary=x"]
    )
    def test_it_is_its_bytes_in_base64(self, content_type: str | None) -> None:
        payload = came(b"\x00\xff", content_type)
        assert (payload.encoding, value(payload)) == ("base64", base64.b64encode(b"\x00\xff").decode())

    @pytest.mark.parametrize(
        "content_type", ["nonsense", "text", "text/", "/plain", "text/plain, application/json", ";;", "\xff"]
    )
    def test_what_is_no_media_type_says_nothing_of_the_bytes(self, content_type: str) -> None:
        assert came(b"\xff", content_type).encoding == "base64"

    @pytest.mark.parametrize(
        "parameters",
        [
            "charset*=a; charset*0=b",
            "charset*" + "9" * 5000 + "=x",
            "charset*0*=a''b; charset*1=c",
            ";" * 60_000,
            'a="' * 20_001,
            "(" * 60_000,
            "\\" * 60_000,
        ],
        ids=["numbered and not", "large number", "encoded", "semicolons", "quotes", "brackets", "backslashes"],
    )
    def test_parameters_that_make_no_sense_are_passed_over(self, parameters: str) -> None:
        assert value(came(b"x", f"text/plain; {parameters}")) == "x"

    @pytest.mark.parametrize("content_type", [None, "application/json", FORM, "text/plain; charset=zip", "image/png"])
    def test_no_body_is_no_payload_whatever_its_type(self, content_type: str | None) -> None:
        payload = came(b"", content_type)
        assert (payload.value, payload.encoding, payload.content_type) == (None, "none", content_type)


class TestStructuredEvents:
    REQUIRED = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "paid"}

    def sent(self, **members: Any) -> bytes:
        return json.dumps({name: it for name, it in {**self.REQUIRED, **members}.items() if it is not ...}).encode()

    @pytest.mark.parametrize("data", [{"amount": 3}, [1], "text", None, 2**70])
    def test_it_is_its_data(self, data: Any) -> None:
        payload = came(self.sent(data=data), f"{EVENT}; charset=utf-8")
        assert (payload.encoding, value(payload)) == ("json", data)

    def test_its_data_in_base64_stays_so(self) -> None:
        payload = came(self.sent(data_base64="AP8="), EVENT)
        assert (payload.encoding, value(payload)) == ("base64", "AP8=")

    def test_without_data_it_is_no_payload(self) -> None:
        payload = came(self.sent(), EVENT)
        assert (payload.value, payload.encoding) == (None, "none")

    def test_its_own_attributes_are_kept_and_extensions_are_not(self) -> None:
        more = {"subject": "s", "time": "2026-01-01T00:00:00Z", "datacontenttype": "application/json"}
        payload = came(self.sent(**more, acmetenant="t", acmecount=1), EVENT)
        assert payload.event == {"id": "7", "source": "/shop", "type": "paid", **more}

    @pytest.mark.parametrize("name", ["specversion", "id", "source", "type"])
    @pytest.mark.parametrize("given", [..., "", None, 5, ["x"]], ids=["missing", "empty", "null", "number", "list"])
    def test_a_required_attribute_must_be_there_as_a_text(self, name: str, given: Any) -> None:
        assert pointer(refusal(self.sent(**{name: given}), EVENT)) == f"/{name}"

    def test_another_version_is_refused(self) -> None:
        assert pointer(refusal(self.sent(specversion="0.3"), EVENT)) == "/specversion"

    @pytest.mark.parametrize("name", ["id", "specversion", "data"])
    def test_what_is_there_twice_is_refused(self, name: str) -> None:
        body = self.sent(data=1)
        assert pointer(refusal(b'{"%s":"7",%s' % (name.encode(), body[1:]), EVENT)) == f"/{name}"

    def test_names_within_the_data_are_not_its_attributes(self) -> None:
        assert value(came(self.sent(data={"id": 1, "data": {"id": 2}}), EVENT)) == {"id": 1, "data": {"id": 2}}

    @pytest.mark.parametrize(
        ("members", "where"),
        [
            ({"data": 1, "data_base64": "AP8="}, "/data_base64"),
            ({"data_base64": "!"}, "/data_base64"),
            ({"data_base64": 1}, "/data_base64"),
            ({"data": {"a": "\0"}}, "/data/a"),
            ({"subject": "\0"}, "/subject"),
            ({"subject": 1}, "/subject"),
        ],
    )
    def test_a_bad_member_is_refused_with_where_it_is(self, members: dict[str, Any], where: str) -> None:
        assert pointer(refusal(self.sent(**members), EVENT)) == where

    def test_data_may_be_as_deep_as_any_payload(self) -> None:
        event = self.sent(data="DEEP")
        assert came(event.replace(b'"DEEP"', b"[" * 64 + b"]" * 64), EVENT).encoding == "json"
        assert pointer(refusal(event.replace(b'"DEEP"', b"[" * 65 + b"]" * 65), EVENT)) == "/data"

    @pytest.mark.parametrize(
        ("body", "code"), [(b"", "malformed-json"), (b"{", "malformed-json"), (b"[]", "invalid-field")]
    )
    def test_what_is_no_object_is_refused(self, body: bytes, code: str) -> None:
        assert refusal(body, EVENT).code == code

    def test_a_batch_is_not_taken(self) -> None:
        refused = refusal(b"[]", "application/cloudevents-batch+json")
        assert (refused.kind, refused.code) == (Kind.UNSUPPORTED, "unsupported-media-type")


class TestBinaryEvents:
    @pytest.mark.parametrize(
        ("content_type", "body", "encoding"),
        [("application/json", b"1", "json"), ("text/plain", b"x", "text"), (None, b"x", "base64"), (None, b"", "none")],
    )
    def test_its_body_is_read_by_its_own_type(self, content_type: str | None, body: bytes, encoding: str) -> None:
        payload = came(body, content_type, *EVENT_HEADERS.items())
        assert payload.encoding == encoding
        assert payload.event == {"id": "7", "source": "/shop", "type": "paid"}

    def test_its_attributes_are_percent_decoded(self) -> None:
        payload = came(b"", None, *{**EVENT_HEADERS, "ce-subject": "gr%C3%BCn%20%25"}.items())
        assert payload.event is not None
        assert payload.event["subject"] == "grün %"

    @pytest.mark.parametrize("name", ["ce-id", "ce-source", "ce-type"])
    def test_a_required_attribute_must_be_there(self, name: str) -> None:
        without = [(header, text) for header, text in EVENT_HEADERS.items() if header != name]
        assert pointer(refusal(b"", None, *without)) == name
        assert pointer(refusal(b"", None, *without, (name, ""))) == name

    @pytest.mark.parametrize("name", EVENT_HEADERS)
    def test_an_attribute_that_is_there_twice_is_refused(self, name: str) -> None:
        assert pointer(refusal(b"", None, *EVENT_HEADERS.items(), (name.upper(), EVENT_HEADERS[name]))) == name

    @pytest.mark.parametrize("text", ["%ff", "%C3", "a%00"])
    def test_an_attribute_that_is_no_text_is_refused(self, text: str) -> None:
        assert pointer(refusal(b"", None, *{**EVENT_HEADERS, "ce-id": text}.items())) == "ce-id"

    def test_another_version_is_refused(self) -> None:
        assert pointer(refusal(b"", None, *{**EVENT_HEADERS, "ce-specversion": "0.3"}.items())) == "ce-specversion"

    def test_without_a_version_it_is_no_event(self) -> None:
        assert came(b"", None, ("ce-id", "7")).event is None


class TestHeaders:
    def test_all_are_there_for_policies_in_lower_case_and_the_first_counts(self) -> None:
        payload = came(b"", None, ("X-Kind", "a"), ("x-kind", "b"), ("Authorization", "c"))
        assert payload.headers == {"x-kind": "a", "authorization": "c"}

    def test_a_few_are_kept(self) -> None:
        kept = {
            "content-type": "image/png", "user-agent": "u", "webhook-id": "1", "webhook-timestamp": "2",
            "idempotency-key": "3", "x-request-id": "4", "x-github-event": "5", "x-github-delivery": "6",
            "traceparent": "7", "ce-acmetenant": "8",
        }  # fmt: skip
        assert came(b"", None, *kept.items(), ("x-other", "9")).kept_headers == kept

    @pytest.mark.parametrize(
        "name", ["authorization", "proxy-authorization", "cookie", "webhook-signature", "x-hub-signature-256",
                 "stripe-signature", "x-slack-signature", "x-api-key"],
    )  # fmt: skip
    def test_no_credential_and_no_signature_is_kept(self, name: str) -> None:
        assert came(b"", None, (name, "secret")).kept_headers == {}

    def test_long_ones_are_cut_and_many_are_dropped(self) -> None:
        payload = came(b"", "a/b;" + "x" * 900, *((f"ce-{n}", "v" * 900) for n in range(50)))
        assert len(payload.kept_headers) == 30
        assert {len(text) for text in payload.kept_headers.values()} == {500}
        assert payload.content_type == payload.kept_headers["content-type"]

    def test_control_characters_are_dropped(self) -> None:
        assert came(b"", "text/pl\x00ain\x7f", ("user-agent", "a\x1fb")).kept_headers == {
            "content-type": "text/plain", "user-agent": "ab",
        }  # fmt: skip


_TYPES = st.sampled_from(["application/json", FORM, "text/plain", "application/xml", EVENT, "image/png", "x"]).flatmap(
    lambda media_type: st.from_regex(r"[;*=\"\\ a\xff0-9]{0,12}(charset\*?[0-9]?\*?=[\"';a-z0-9-]{0,9}){0,2}").map(
        lambda parameters: f"{media_type};{parameters}"
    )
)
_LATIN = st.text(st.characters(max_codepoint=255))
_NAMES = st.sampled_from([*EVENT_HEADERS, "CE-ID", "ce-subject", "user-agent"]) | _LATIN
_BODIES = st.binary() | st.sampled_from([b"{}", b"a=1&a=%f", b"[1]", b'{"specversion":"1.0","id":"7","id":1}'])


@given(content_type=_TYPES | _LATIN, more=st.lists(st.tuples(_NAMES, _LATIN), max_size=6), body=_BODIES)
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_whatever_comes_is_storable_or_refused(content_type: str, more: list[tuple[str, str]], body: bytes) -> None:
    try:
        payload = came(body, content_type.encode("latin-1", "ignore").decode("latin-1"), *more)
    except Refusal:
        return
    assert payload.body == body
    stored = json.dumps([value(payload), payload.event, payload.kept_headers, payload.content_type])
    assert "\\u0000" not in stored
