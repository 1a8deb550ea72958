"""The size of the house: lines of each folder, rooms, and imports that form no circle.

The figures are what the folders have reached on the way to 45,000 lines of program and 42,000 of tests:
they go down. A folder that needs more lines gets them here, with the reason in the commit.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ("protocol", "shm", "workers", "pipeline", "launch")
SUFFIXES = {".py", ".c", ".h", ".cu", ".cuh", ".js", ".html", ".css"}
LINES = {
    "protocol": 2_600,
    "shm": 4_800,
    "workers": 10_425,
    "pipeline": 43_388,
    "launch": 14_740,
    "benchmarks": 8_400,
    "tests": 64_420,
}
ROOMS = 306  # Python files of the program, without those that only mark a package


@pytest.mark.parametrize("folder", LINES)
def test_folder_keeps_its_budget_of_lines(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert sum(path.read_bytes().count(b"\n") for path in files) <= LINES[folder]


def test_program_keeps_its_number_of_rooms() -> None:
    rooms = [path for folder in PROGRAM for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"]
    assert len(rooms) <= ROOMS


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Returns the modules of the program that a file imports wherever it stands in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            names |= within or {node.module}
    return names & modules


def test_no_imports_form_a_circle() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in PROGRAM
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    }
    left = {module: imports_of(path, set(paths)) for module, path in paths.items()}
    while free := [module for module, needed in left.items() if not needed & set(left)]:
        for module in free:
            del left[module]
    # What is left is in a circle or imports one: only modules that others of them import are in it.
    while unused := set(left) - {name for needed in left.values() for name in needed}:
        for module in unused:
            del left[module]
    assert not sorted(left)
