"""Policies: what expressions decide, that their errors are closed, and that nothing they do stops the service."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.callbacks.evaluator import Evaluator, Text, evaluating, texts_of
from app.callbacks.policy import Arrived, Decision, Policy, PolicyError
from app.errors import Refusal

T = TypeVar("T")
JOB = {"id": "01a2", "queue": "q", "kind": "charge", "attempt": 1, "args": {"amount": 40}, "tags": [], "metadata": None}


def arrived(payload: Any, **headers: str) -> Arrived:
    return Arrived(msgspec.Raw(json.dumps(payload).encode()), headers, msgspec.Raw(json.dumps(JOB).encode()))


def with_evaluator(ask: Callable[[Evaluator], Awaitable[T]], seconds: float = 5) -> T:
    async def asked() -> T:
        async with evaluating(seconds) as evaluator:
            return await ask(evaluator)

    return asyncio.run(asked())


def decide(payload: Any, headers: dict[str, str] | None = None, **policy: str) -> Decision:
    return with_evaluator(lambda evaluator: evaluator.decide(Policy(**policy), arrived(payload, **(headers or {}))))


def value(text: str, payload: Any = None) -> Any:
    return with_evaluator(lambda evaluator: evaluator.values([Text("/it", text, False)], arrived(payload)))[0]


class TestOrder:
    FULL = {
        "filter": "payload.f",
        "fail_if": "payload.a",
        "complete_if": "payload.b",
        "resume_if": "payload.c",
        "transform": "{'was': payload}",
    }

    @pytest.mark.parametrize(
        ("payload", "verb"),
        [
            ({"f": True, "a": True}, "fail"),
            ({"f": True, "a": False, "b": True}, "complete"),
            ({"f": True, "a": False, "b": False, "c": True}, "resume"),
            ({"f": True, "a": False, "b": False, "c": False}, None),
        ],
    )
    def test_the_first_that_is_true_decides_and_the_rest_is_not_looked_at(self, payload: Any, verb: str | None) -> None:
        decided = decide(payload, **self.FULL)
        assert (decided.verb, decided.ignored) == (verb, False)
        assert json.loads(bytes(decided.payload)) == {"was": payload}

    def test_what_the_filter_is_false_for_is_ignored_whatever_the_rest_says(self) -> None:
        assert decide({"f": False}, **self.FULL) == Decision(ignored=True)

    def test_headers_and_the_job_can_be_asked(self) -> None:
        policy = {"complete_if": "headers['x-kind'] == job.kind && job.args.amount == payload"}
        assert decide(40, {"x-kind": "charge"}, **policy).verb == "complete"
        assert decide(41, {"x-kind": "charge"}, **policy).verb is None


class TestErrorsAreClosed:
    @pytest.mark.parametrize(
        ("policy", "expression"),
        [
            ({"filter": "payload.missing == 1"}, "filter"),
            ({"fail_if": "payload.text < 3"}, "fail_if"),
            ({"complete_if": "payload.text"}, "complete_if"),
            ({"resume_if": "payload.n / 0 == 1"}, "resume_if"),
            ({"resume_if": "headers['nobody-sent-it'] == 'x'"}, "resume_if"),
            ({"transform": "payload.missing"}, "transform"),
            ({"transform": "1.0 / 0.0"}, "transform"),
            ({"transform": "timestamp('2026-01-01T00:00:00Z')"}, "transform"),
            ({"transform": "{1: 'a'}"}, "transform"),
            ({"transform": "b'bytes'"}, "transform"),
            ({"transform": "'a\\u0000b'"}, "transform"),
            ({"transform": "{'\\u0000': payload.n}"}, "transform"),
        ],
    )
    def test_what_cannot_be_evaluated_decides_nothing(self, policy: dict[str, str], expression: str) -> None:
        with pytest.raises(PolicyError) as error:
            decide({"text": "a private text", "n": 1}, **policy)
        assert error.value.expression == expression
        assert "private" not in str(error.value)

    def test_what_a_transform_makes_is_as_deep_as_a_payload_may_be(self) -> None:
        deep: Any = 1
        for _ in range(63):
            deep = [deep]
        assert json.loads(bytes(decide(deep, transform="[payload]").payload)) == [deep]
        with pytest.raises(PolicyError, match="transform gives what can't be stored"):
            decide(deep, transform="[[payload]]")

    def test_a_number_beyond_64_bits_is_refused(self) -> None:
        with pytest.raises(PolicyError):
            decide({"n": 2**70}, complete_if="payload.n > 0")


class TestBounds:
    DOUBLING = "['x']" + ".map(b, b + b)" * 60 + ".size() == 1"

    @pytest.mark.parametrize(
        "text",
        [
            DOUBLING,
            "payload.l.map(x, payload.s + payload.s + payload.s).size() == 1",
            "[payload]" + ".map(b, [b, b])" * 40 + ".exists(b, b == b)",
            "payload.l.all(a, payload.l.all(b, payload.l.all(c, payload.l.all(d, true))))",
        ],
        ids=["doubled texts", "large texts", "shared structures", "nested loops"],
    )
    def test_an_expression_without_end_is_refused_and_the_next_is_answered(self, text: str) -> None:
        payload = {"l": list(range(9000)), "s": "x" * 500_000}

        async def both(evaluator: Evaluator) -> Decision:
            with pytest.raises(PolicyError, match="takes too long or too much|goes on for too long"):
                await evaluator.decide(Policy(filter=text), arrived(payload))
            return await evaluator.decide(Policy(filter="payload == 1"), arrived(1))

        assert with_evaluator(both, seconds=1) == Decision()

    def test_what_was_killed_is_refused_at_once_for_a_while_so_that_others_get_their_turn(self) -> None:
        endless = Policy(filter="payload.l.map(x, payload.s + payload.s + payload.s).size() == 1")
        heavy = arrived({"l": list(range(9000)), "s": "x" * 500_000})

        async def killed_once(evaluator: Evaluator) -> float:
            with pytest.raises(PolicyError):
                await evaluator.decide(endless, heavy)
            began = asyncio.get_running_loop().time()
            for _ in range(10):
                with pytest.raises(PolicyError):
                    await evaluator.decide(endless, arrived({"l": [], "s": ""}))
            return asyncio.get_running_loop().time() - began

        # Ten would take ten times this if each were tried.
        assert with_evaluator(killed_once, seconds=0.3) < 0.3

    def test_a_caller_that_goes_away_leaves_its_answer_to_nobody(self) -> None:
        async def cancelled(evaluator: Evaluator) -> Any:
            long = asyncio.create_task(evaluator.decide(Policy(filter=self.DOUBLING), arrived(1)))
            await asyncio.sleep(0)
            long.cancel()
            return await evaluator.values([Text("/it", "payload", False)], arrived("mine"))

        assert with_evaluator(cancelled) == ["mine"]

    @pytest.mark.parametrize("text", ["(" * 300 + "1" + ")" * 300, "!" * 3000 + "true", "[" * 500 + "]" * 500])
    def test_a_deep_expression_is_refused_or_harmless(self, text: str) -> None:
        async def checked(evaluator: Evaluator) -> None:
            try:
                await evaluator.check([Text("/filter", text, False)])
            except Refusal as refusal:
                assert refusal.code == "invalid-field"
            await evaluator.check([Text("/filter", "true", True)])

        with_evaluator(checked)


class TestCompiling:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("payload.a ==", "line 1, column 13: Syntax error"),
            ("true &&\n  payloa", "line 2, column 3: undeclared reference to 'payloa'"),
            ("job.kind", "line|must be true or false"),
            ("1 + 1", "must be true or false, and is int"),
            ("'a' + 1 == 2", "line 1, column 5: found no matching overload"),
        ],
    )
    def test_what_is_wrong_is_told_with_where(self, text: str, said: str) -> None:
        if text == "job.kind":  # may be a boolean: that is seen when it is evaluated
            assert with_evaluator(lambda evaluator: evaluator.check([Text("/it", text, True)])) is None
            return
        with pytest.raises(Refusal, match=said) as refused:
            with_evaluator(lambda evaluator: evaluator.check([Text("/policy/filter", text, True)]))
        assert refused.value.facts["errors"][0]["pointer"] == "/policy/filter"

    def test_every_expression_of_a_policy_is_checked(self) -> None:
        policy = Policy(filter="true", fail_if="a", complete_if="b", resume_if="c", transform="d")
        assert [text.name for text in texts_of(policy, "/policy")] == [
            "/policy/filter", "/policy/fail_if", "/policy/complete_if", "/policy/resume_if", "/policy/transform",
        ]  # fmt: skip


class TestValues:
    @pytest.mark.parametrize(
        "payload", [None, True, 1, 2**53 + 1, -(2**63), 2**63, 1.5, "ü€😀", [], {"a": [{"b": None}]}]
    )
    def test_json_comes_through_equal(self, payload: Any) -> None:
        assert value("payload", payload) == payload


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
_EXPRESSIONS = (
    "payload.a", "payload == 1", "payload.exists(x, x == 'a')", "size(payload) > 1", "payload.a.b.c", "payload[0]",
    "string(payload) == 'x'", "int(payload) > 1", "payload ? true : false", "payload.map(x, x).size() == 0",
    "has(payload.a)", "payload in [1, 'a']", "payload.matches('(a|b)*c')", "timestamp(payload) > timestamp(0)",
)  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> Any:
    """An evaluator in an event loop that goes on through a module's tests."""
    with asyncio.Runner() as runner:
        evaluator = Evaluator(5)
        yield lambda policy, payload: runner.run(evaluator.decide(policy, arrived(payload)))
        runner.run(evaluator.stop())


@given(payload=_JSON, text=st.sampled_from(_EXPRESSIONS))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_any_payload_is_decided_or_refused(answers: Any, payload: Any, text: str) -> None:
    try:
        assert isinstance(answers(Policy(complete_if=text, transform="payload"), payload), Decision)
    except PolicyError as error:
        assert error.expression in ("complete_if", "transform")
