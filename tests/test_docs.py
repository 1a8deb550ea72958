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
ANCHOR = re.compile(r"\]\(((?![a-z]+:)[^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"")
COMMAND = re.compile(r"^(?:\$ )?python launch\.py(.*?)(?: {2,}.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    named = {ROOT / path for path in PATH.findall(text)} | {
        page.parent / (link or picture) for link, picture in LINK.findall(text)
    }
    assert not [str(path.relative_to(ROOT)) for path in named if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    for name, anchor in ANCHOR.findall(page.read_text()):
        headings = HEADING.findall((page.parent / name if name else page).read_text())
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{name}#{anchor}"


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


def section(heading: str) -> str:
    text = (ROOT / "docs/architecture.md").read_text()
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def lines_of(text: str) -> int:
    """Of all files that a text names."""
    return sum(len((ROOT / path).read_text().splitlines()) for path in PATH.findall(text))


def test_decode_path_is_read_in_one_sitting() -> None:
    path, _, others = section("The decode path: read these").partition("Also passed through")
    assert 15 <= len(PATH.findall(path)) <= 20
    assert lines_of(path) <= 3800
    rows = re.findall(r"^\| (`.*?) \| (\d+) \|", others, re.MULTILINE)
    assert rows
    for files, lines in rows:
        assert 0.8 < lines_of(files) / int(lines) < 1.25, files


def test_imports_go_down_the_list_of_rooms() -> None:
    rooms: dict[str, int] = {}
    for number, row in enumerate(re.findall(r"^\| (`.*?) \|", section("Rooms"), re.MULTILINE)):
        for name in re.findall(r"`([\w./]+)`", row):
            package = "" if name.split("/")[0] in PACKAGES else f"{row[1:].split('/')[0]}/"
            rooms[(package + name).removesuffix(".py").strip("/").replace("/", ".")] = number

    def place(module: str) -> int:
        return rooms[max((room for room in rooms if f"{module}.".startswith(f"{room}.")), key=len)]

    for package in ("launch", "pipeline"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if module != package:
                imported = re.findall(rf"^ *from ({package}\.[\w.]+) import", path.read_text(), re.MULTILINE)
                assert not [name for name in imported if place(name) < place(module)], module
