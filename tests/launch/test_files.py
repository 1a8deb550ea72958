"""Files that commands read and write: lines of stdin, the matrix of log-probabilities."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from engines import run
from hypothesis import given
from hypothesis import strategies as st

from launch.command_line.checks import read_ids, read_text
from launch.errors import WrongUsage
from launch.score.command import matrix_file, windows_of
from launch.stress.load import read_script
from launch.terminal.interrupts import Lines


async def all_lines(fd: int) -> list[str]:
    lines = Lines(fd)
    found = []
    while (line := await lines.next()) is not None:
        found.append(line)
    return found


async def test_lines_of_a_pipe_are_read_as_they_are_written() -> None:
    reading, writing = os.pipe()
    try:
        lines = Lines(reading)
        text = "one\nzwölf\n\nlast".encode()
        middle = text.index("ö".encode()) + 1  # inside the character
        os.write(writing, text[:middle])
        assert await lines.next() == "one"
        waiting = asyncio.create_task(lines.next())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        os.write(writing, text[middle:])
        os.close(writing)
        assert await waiting == "zwölf"
        assert [await lines.next() for _ in range(3)] == ["", "last", None]
    finally:
        os.close(reading)


async def test_lines_of_a_file_and_of_nothing(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    file.write_bytes(b"a\nb\xff\n")
    for path, expected in ((file, ["a", "b\ufffd"]), (Path("/dev/null"), [])):
        fd = os.open(path, os.O_RDONLY)
        try:
            assert await all_lines(fd) == expected
        finally:
            os.close(fd)


def test_a_pipe_without_a_writer_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_text, read_ids, read_script):
        with pytest.raises(WrongUsage, match="is not a file"):
            read(tmp_path / "pipe")


def test_a_start_does_not_wait_for_a_pipe_in_the_models_folder(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        code, out, err = run("generate", "a", "--model", str(folder), limit=20)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1] == f"launch.py: {folder / name} cannot be read: it is not a file"
        (folder / name).unlink()
        shutil.copy(tiny_model / name, folder)


def test_a_matrix_is_what_numpy_reads(tmp_path: Path) -> None:
    blocks = [
        np.random.default_rng(i).standard_normal((n, 7)).astype(np.float32) for i, n in enumerate((3, 1, 200))
    ]
    with matrix_file(tmp_path / "p.npy", 204, 7) as append:
        for block in blocks:
            append(block)
        assert not (tmp_path / "p.npy").exists()
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy", allow_pickle=False), np.concatenate(blocks))
    assert list(tmp_path.iterdir()) == [tmp_path / "p.npy"]


def test_an_unfinished_matrix_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), matrix_file(tmp_path / "p.npy", 1, 7):
        raise RuntimeError("the engine is gone")
    assert list(tmp_path.iterdir()) == []


@given(tokens=st.integers(0, 300), context=st.integers(2, 60))
def test_windows_count_each_row_once(tokens: int, context: int) -> None:
    windows = list(windows_of(tokens, context))
    assert [row for w in windows for row in range(w.first, w.stop)] == list(range(tokens))
    for w in windows:
        assert w.end - w.start <= context
        assert w.start <= w.first <= w.stop <= w.end
    for w in windows[1:]:  # row `first` is predicted from the tokens up to it
        assert w.first - w.start + 1 >= context - context // 2
