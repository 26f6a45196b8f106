"""The documentation is current and whole: what it names exists, and what exists is named."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from app.cli.main import main as command_line
from app.http.problems import PROBLEM_STATUS
from app.settings import Settings
from tests.docs.pages import PAGES, ROOT, name

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Read by the tests and the demo, not by the service.
NO_SETTINGS = {"TOWPATH_TEST_DATABASE_URL", "TOWPATH_TEST_RESTART_COMMAND", "TOWPATH_DEMO_URL"}


def links(page: Path) -> list[tuple[Path, str]]:
    """Where the relative links of a page lead: files, and headings in them."""
    found = [link.partition("#") for link in LINK.findall(page.read_text()) if not re.match(r"\w+:", link)]
    return [(page.parent / file if file else page, heading) for file, _, heading in found]


def headings(page: Path) -> set[str]:
    """The headings of a page, as they are written in a link."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture
def generate(tmp_path: Path) -> ModuleType:
    """The generator, at work on a copy of the pages that it writes."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in module.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    module.ROOT = tmp_path  # type: ignore[attr-defined]
    return module


def test_the_generated_parts_are_current(generate: ModuleType) -> None:
    assert list(generate.stale_pages()) == [], "run `make docs`"


def test_a_part_that_is_not_current_is_told_and_mended(
    generate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    current = page.read_text()
    page.write_text(current.replace("running --> completed", "running --> nowhere"))
    (tmp_path / "docs/reference/settings.md").unlink()
    assert generate.main(check=True) == 2
    assert "README.md is not current" in capsys.readouterr().out
    assert "nowhere" in page.read_text()
    assert generate.main(check=False) == 0
    assert page.read_text() == current
    assert generate.main(check=True) == 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = [
        f"{file}#{heading}"
        for file, heading in links(page)
        if not file.exists() or (heading and heading not in headings(file))
    ]
    assert dead == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached: set[Path] = set()
    to_visit = [DOCS / "index.md"]
    while to_visit:
        page = to_visit.pop().resolve()
        if page not in reached and page.suffix == ".md" and page.is_relative_to(DOCS):
            reached.add(page)
            to_visit += [file for file, _ in links(page)]
    assert set(DOCS.glob("**/*.md")) - reached == set()


def test_every_problem_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", (DOCS / "reference/problems.md").read_text(), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == PROBLEM_STATUS


def test_the_map_of_calls_is_that_of_the_openapi_document() -> None:
    rows = re.findall(r"^\| `([A-Z]+ /\S*)` \|", (DOCS / "reference/api.md").read_text(), re.MULTILINE)
    paths = json.loads((ROOT / "openapi/openapi.json").read_text())["paths"]
    assert sorted(rows) == sorted(f"{method.upper()} {path}" for path, calls in paths.items() for method in calls)


def test_every_command_is_documented_and_no_other() -> None:
    documented = re.findall(r"^\| `towpath (\w+)` \|", (DOCS / "reference/cli.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(get_command(command_line).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    settings = {f"TOWPATH_{field.upper()}" for field in Settings.model_fields}
    assert set(re.findall(r"TOWPATH_[A-Z_]+", page.read_text())) - settings - NO_SETTINGS == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^|    )make ([a-z-]+)", page.read_text(), re.MULTILINE)) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`((?:app|tests|docs|examples|openapi|alembic)/[\w./-]+)`", page.read_text())
    assert [file for file in named if not (ROOT / file).exists()] == []
