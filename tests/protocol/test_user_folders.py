"""This user's folders by the XDG rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.chat.repl import history_file
from protocol.program import user_folder


@pytest.mark.parametrize(
    ("variable", "folder", "default", "end"),
    [
        ("XDG_CACHE_HOME", lambda: user_folder("CACHE"), ".cache", "tandem"),
        ("XDG_STATE_HOME", history_file, ".local/state", "tandem/history"),
    ],
)
def test_a_variable_that_is_no_absolute_path_counts_as_not_set(
    monkeypatch: pytest.MonkeyPatch, variable: str, folder: Callable[[], Path], default: str, end: str
) -> None:
    monkeypatch.setenv(variable, "/somewhere")
    assert folder() == Path("/somewhere", end)
    for unset in ("", "relative/folder", "~/x"):
        monkeypatch.setenv(variable, unset)
        assert folder() == Path.home() / default / end
