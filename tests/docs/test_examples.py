"""The examples of the documentation run, and are answered as it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

from app.settings import Settings
from tests.docs.pages import ADDRESS, HOW_TOS, MORE, PAGES, ROOT, Example, abbreviated, differences, examples, name
from tests.servers import ServiceThread

WITH_EXAMPLES = [page for page in PAGES if examples(page)]

# One script a page, so that an example can use what those before it made. `curl` fails as with --fail-with-body, and
# keeps the last answer.
PRELUDE = r"""set -euo pipefail
curl() {
  local status options=(--silent --show-error --max-time 30 --output last-answer --write-out '%{http_code}')
  : > last-answer
  status=$(command curl "${options[@]}" "$@") || return
  echo "$status" > last-status
  cat last-answer
  echo
  [ "$status" -lt 400 ] || [ "$status" = "$refused_with" ]
}
"""
SQL = """import os, sys, psycopg
connection = psycopg.connect(os.environ["TOWPATH_DATABASE_URL"], autocommit=sys.argv[1] == "")
connection.execute(sys.stdin.read())
connection.rollback()"""
PROGRAMS = {"python": "python3 -", "js": "node --input-type=module -", "sql": 'python3 -c "$SQL" "$option"'}


def test_every_page_for_doing_something_has_an_example_that_is_run() -> None:
    assert [name(page) for page in (ROOT / "README.md", ROOT / "docs/start.md", *HOW_TOS) if not examples(page)] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/start.md", *HOW_TOS], ids=name)
def test_no_example_with_curl_is_left_out(page: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    run = [example.text for example in examples(page)]
    assert [block for block in blocks if "curl" in block and block not in run] == []


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_the_examples_of_a_page_run_and_are_answered_as_it_says(
    page: Path, service: ServiceThread, settings: Settings, tmp_path: Path
) -> None:
    shown = examples(page)
    script = PRELUDE + "".join(f"echo '--- example {n}'\n{command(example, n)}" for n, example in enumerate(shown))
    ran = subprocess.run(
        ["bash", "-c", script.replace(ADDRESS, service.url)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TOWPATH_DATABASE_URL": as_url(settings.database_url),
            "SQL": SQL,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout
    wrong = {
        n: found
        for n, example in enumerate(shown)
        if example.answer
        and (found := differences(abbreviated(example.answer), json.loads((tmp_path / f"answer-{n}").read_text())))
    }
    assert wrong == {}, ran.stdout


def command(example: Example, n: int) -> str:
    """What runs an example in the page's script, and keeps the answer to its last call."""
    set_up = f"refused_with='{example.refused_with}' option='{example.option or ''}'\n"
    if example.language == "bash":
        kept = f"cp last-answer answer-{n}\n" if example.answer else ""
        refused = f'[ "$(cat last-status)" = {example.refused_with} ]\n' if example.refused_with else ""
        return f"{set_up}{example.text}\n{refused}{kept}"
    if example.language == "js" and shutil.which("node") is None:
        return ""
    return f"{set_up}export option; {PROGRAMS[example.language]} <<'END OF EXAMPLE'\n{example.text}END OF EXAMPLE\n"


def as_url(conninfo: str) -> str:
    """A connection string as the URL that an example expects."""
    given = {key: str(value) for key, value in conninfo_to_dict(conninfo).items() if value is not None}
    user, password, database = (given.pop(key, "") for key in ("user", "password", "dbname"))
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    return f"postgresql://{login}@/{quote(database, safe='')}?{urlencode(given)}"


class TestAbbreviation:
    def test_what_is_not_said_is_told(self) -> None:
        assert differences(abbreviated('{"a": 1}'), {"a": 1, "b": 2}) == ["/b: is not said"]

    def test_what_is_left_out_may_be_there(self) -> None:
        assert differences(abbreviated('{"a": [{"b": "x…"}, …], …}'), {"a": [{"b": "xyz"}, 2, 3], "c": 4}) == []

    @pytest.mark.parametrize(
        ("said", "answered"),
        [
            ('{"a": 1, …}', {"b": 1}),
            ('{"a": true}', {"a": 1}),
            ('["x…"]', ["yz"]),
            ("[1, …]", []),
            ("[1]", [1, 2]),
            ('{"a": {"b": null}}', {"a": {"b": 0}}),
        ],
    )
    def test_another_answer_is_told(self, said: str, answered: object) -> None:
        assert differences(abbreviated(said), answered)

    def test_anything_may_stand_for_a_value(self) -> None:
        assert differences(abbreviated('{"a": …, "b": "…"}'), {"a": [1], "b": 2}) == []
        assert abbreviated(f'"{MORE}"') == MORE
