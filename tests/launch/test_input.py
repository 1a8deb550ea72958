"""The REPL's input line: completions, and the history of earlier sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.chat.repl import history_file, open_history


async def test_history_is_private_and_an_unusable_file_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    warnings: list[str] = []
    first, path = open_history(warnings.append), history_file()
    assert [line async for line in first.load()] == []
    for line in ("one", "two\nlines \udcff", "three"):
        first.append_string(line)
    path.write_bytes(path.read_bytes() + b"\xff damaged\n{}\n")
    assert [line async for line in open_history(warnings.append).load()] == ["three", "two\nlines �", "one"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert warnings == []

    path.unlink()
    (tmp_path / "other").touch()
    path.symlink_to(tmp_path / "other")  # is not followed
    unusable = open_history(warnings.append)
    unusable.append_string("four")
    assert [line async for line in unusable.load()] == ["four"]
    assert len(warnings) == 1
    assert (tmp_path / "other").read_text() == ""
