"""The documentation names files, links and commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch.command_line.options import parse

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "shm", "workers", "pipeline", "launch", "benchmarks")
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
PATH = re.compile(r"`((?:launch|pipeline|workers|shm|protocol|tests|benchmarks|docs)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
COMMAND = re.compile(r"^python launch\.py(.*?)(?: {2,}.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    named = {ROOT / path for path in PATH.findall(text)} | {page.parent / link for link in LINK.findall(text)}
    assert not [str(path.relative_to(ROOT)) for path in named if not path.exists()]


def test_docstrings_name_files_that_exist() -> None:
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    named = {path: PATH.findall(path.read_text()) for path in sources}
    assert not [
        (str(path), name) for path, names in named.items() for name in names if not (ROOT / name).exists()
    ]
    assert not [str(path) for path in sources if "DESIGN.md" in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_commands_are_understood(page: Path) -> None:
    for words in COMMAND.findall(page.read_text()):
        parse(shlex.split(words))


def test_decode_path_is_read_in_one_sitting() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## The decode path: read these")[2].partition("\n## ")[0]
    files = [ROOT / path for path in re.findall(r"^\| `([\w./]+)` \|", section, re.MULTILINE)]
    assert 15 <= len(files) <= 20
    assert sum(len(path.read_text().splitlines()) for path in files) <= 3500
