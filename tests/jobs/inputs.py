"""Jobs that every way to enqueue takes, and jobs that every way refuses with the same pointer."""

from tests.build import JSON

TEN_YEARS = 315_360_000
ONE_YEAR = 31_536_000


def nested(depth: int) -> JSON:
    """An object of objects, so many levels deep."""
    value: JSON = {}
    for _ in range(depth - 1):
        value = {"in": value}
    return value


AT_ITS_BOUND: list[JSON] = [
    {"kind": "a"},
    {"kind": "k" * 200},
    {"kind": "a/b.c:d-e_9"},
    {"queue": "q" * 100},
    {"queue": "a.b:c-d_9"},
    {"priority": 1},
    {"priority": 4},
    {"max_attempts": 1},
    {"max_attempts": 1000},
    {"delay_seconds": 0},
    {"delay_seconds": TEN_YEARS},
    {"timeout_seconds": 1},
    {"timeout_seconds": ONE_YEAR},
    {"tags": ["t" * 100]},
    {"tags": [str(n) for n in range(20)]},
    {"backoff": {"kind": "linear", "base_seconds": 0, "factor": 1, "cap_seconds": 0, "jitter": 0}},
    {"backoff": {"kind": "fixed", "base_seconds": ONE_YEAR, "factor": 100, "cap_seconds": ONE_YEAR, "jitter": 1}},
    {"start_by": "9999-12-31T23:59:59Z"},
    {"run_at": None, "delay_seconds": None, "max_attempts": None, "timeout_seconds": None, "backoff": None},
    {"start_by": None, "metadata": None},
    {"args": None},
    {"args": "text"},
    {"args": [2**53 + 1, "é", {"a": None}, 0.1]},
    {"args": nested(64)},
    {"args": 10**999},
    {"metadata": {"a": {"b": [None, "\\u0000"]}}},
    {"metadata": nested(64)},
]

BEYOND_ITS_BOUND: list[tuple[JSON, str]] = [
    ({"kind": ""}, "/kind"),
    ({"kind": "k" * 201}, "/kind"),
    ({"kind": "two words"}, "/kind"),
    ({"kind": None}, "/kind"),
    ({"queue": ""}, "/queue"),
    ({"queue": "q" * 101}, "/queue"),
    ({"queue": "a/b"}, "/queue"),
    ({"queue": ".hidden"}, "/queue"),
    ({"priority": 0}, "/priority"),
    ({"priority": 5}, "/priority"),
    ({"max_attempts": 0}, "/max_attempts"),
    ({"max_attempts": -1}, "/max_attempts"),
    ({"max_attempts": 1001}, "/max_attempts"),
    ({"max_attempts": 2**31}, "/max_attempts"),
    ({"max_attempts": "three"}, "/max_attempts"),
    ({"delay_seconds": -0.001}, "/delay_seconds"),
    ({"delay_seconds": TEN_YEARS + 1}, "/delay_seconds"),
    ({"delay_seconds": 1, "run_at": "2099-01-01T00:00:00Z"}, "/delay_seconds"),
    ({"timeout_seconds": 0.999}, "/timeout_seconds"),
    ({"timeout_seconds": ONE_YEAR + 1}, "/timeout_seconds"),
    ({"run_at": "2099-01-01T00:00:00"}, "/run_at"),
    ({"run_at": "infinity"}, "/run_at"),
    ({"run_at": 4070908800}, "/run_at"),
    ({"run_at": "9999-12-31T23:59:59-01:00"}, "/run_at"),
    ({"run_at": "2099-01-01T00:00:00+16:00"}, "/run_at"),
    ({"start_by": "tomorrow"}, "/start_by"),
    ({"start_by": "9999-12-31T23:59:59-01:00"}, "/start_by"),
    ({"start_by": "0001-01-01T00:00:00+01:00"}, "/start_by"),
    ({"tags": ["t"] * 21}, "/tags"),
    ({"tags": ["good", ""]}, "/tags/1"),
    ({"tags": ["t" * 101]}, "/tags/0"),
    ({"backoff": {"kind": "random"}}, "/backoff/kind"),
    ({"backoff": {"base_seconds": -1}}, "/backoff/base_seconds"),
    ({"backoff": {"factor": 0.5}}, "/backoff/factor"),
    ({"backoff": {"cap_seconds": ONE_YEAR + 1}}, "/backoff/cap_seconds"),
    ({"backoff": {"jitter": 1.01}}, "/backoff/jitter"),
    ({"backoff": {"bias": 1}}, "/backoff/bias"),
    ({"metadata": ["not an object"]}, "/metadata"),
    ({"colour": "red"}, "/colour"),
    ({"a/b~c": 1}, "/a~1b~0c"),
    ({"queue": None}, "/queue"),
    ({"priority": None}, "/priority"),
    ({"priority": 2.5}, "/priority"),
    ({"priority": 2.0}, "/priority"),
    ({"priority": True}, "/priority"),
    ({"delay_seconds": "5"}, "/delay_seconds"),
    ({"run_at": "2099-02-30T00:00:00Z"}, "/run_at"),
    ({"run_at": "2099-01-01T24:00:00Z"}, "/run_at"),
    ({"run_at": "2099-01-01T00:00:60Z"}, "/run_at"),
    ({"tags": None}, "/tags"),
    ({"tags": "one"}, "/tags"),
    ({"tags": [None]}, "/tags/0"),
    ({"backoff": []}, "/backoff"),
    ({"backoff": {"kind": None}}, "/backoff/kind"),
    ({"backoff": {"factor": None}}, "/backoff/factor"),
    ({"args": nested(65)}, "/args"),
    ({"args": 10**1000}, "/args"),
    ({"metadata": nested(65)}, "/metadata"),
]
