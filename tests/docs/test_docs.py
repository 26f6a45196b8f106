"""The documentation is current, whole, and its examples run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.http.problems import TITLES
from app.settings import Settings
from tests.servers import ServiceThread

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
BLOCK = re.compile(r"<!-- run -->\n```(\w+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_generated_parts_are_current() -> None:
    made = subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not link.startswith(("http", "mailto:"))]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("code", TITLES)
def test_every_problem_is_documented(code: str) -> None:
    assert f"`{code}`" in (ROOT / "docs/reference/problems.md").read_text()


def test_every_page_can_be_found_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"index.md"}
    assert {page for page in pages if page not in index and not page.startswith("decisions/0")} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name)
def test_the_examples_of_a_page_run(page: Path, service: ServiceThread, settings: Settings, tmp_path: Path) -> None:
    environment = {**os.environ, "TOWPATH_DATABASE_URL": settings.database_url}
    blocks = BLOCK.findall(page.read_text())
    shell = "\n".join(text for language, text in blocks if language == "bash")
    if shell:
        strict = 'set -eu\ncurl() { command curl --silent --show-error --fail-with-body "$@"; echo; }\n'
        script = strict + shell.replace("http://127.0.0.1:8080", service.url)
        ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    for program in (text for language, text in blocks if language == "python"):
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def test_the_readmes_answers_are_those_of_the_service(service: ServiceThread, tmp_path: Path) -> None:
    blocks = [text for language, text in BLOCK.findall((ROOT / "README.md").read_text()) if language == "bash"]
    script = "\n".join(blocks).replace("http://127.0.0.1:8080", service.url)
    ran = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    last = json.loads(ran.stdout[ran.stdout.rindex('{"id"') :])
    assert (last["state"], last["already_applied"]) == ("completed", False)
