"""Single values of the command line, and files that a command reads, at the edges of what is allowed."""

from __future__ import annotations

import json
import math
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.command_line.checks import (
    check_engine,
    check_http,
    check_new_file,
    check_request,
    read_file,
    read_ids,
    read_text,
)
from launch.command_line.values import (
    above,
    absolute,
    at_least,
    between,
    http_address,
    model_path,
    not_empty,
    origins,
    size,
    token_ids,
)
from launch.errors import WrongUsage
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from protocol.messages import Generate


@pytest.mark.parametrize(
    ("parse", "good", "wrong"),
    [
        (at_least(2), {"2": 2, str(2**63 - 1): 2**63 - 1}, ["1", str(2**63), "2.5", "x", ""]),
        (between(0.0, 1.0), {"0": 0, "1": 1, "0.5": 0.5}, ["-0.01", "1.01", "nan", "x"]),
        (between(0.0, math.inf), {"0": 0, "1e300": 1e300}, ["-1", "inf"]),
        (above(0.0, 1.0), {"1e-9": 1e-9, "1": 1}, ["0", "1.01"]),
        (above(0.0), {"1e9": 1e9}, ["0", "inf"]),
        (
            size,
            {"0": 0, "5": 5, "500MB": 500_000_000, "1.5G": 1_500_000_000, "2k": 2000, "3 TB": 3 * 10**12},
            ["", "-1", "5XB", "1.5.5", "MB", "1e3"],
        ),
        (token_ids, {"0": (0,), "1,2": (1, 2)}, ["-1", "1,-2", "1,", "a", ""]),
        (
            origins,
            {
                "HTTP://LocalHost:3000, https://a.example:443": (
                    "http://localhost:3000",
                    "https://a.example",
                ),
                "app://obsidian.md,http://[::1]:80,*": ("app://obsidian.md", "http://[::1]", "*"),
            },
            ["", "localhost:3000", "http://a/", "http://a,", "null", "http://a:x", "http://b@a"],
        ),
        (absolute, {"/a": Path("/a"), "a": Path("a").absolute()}, [""]),
        (not_empty, {"a": "a"}, [""]),
        (
            model_path,
            {
                "shape:mixtral-8x7b": Path("shape:mixtral-8x7b"),
                "./a": Path("a"),
                "a/b:Q8_0": Path("a/b:Q8_0"),
            },
            [],
        ),
    ],
)
def test_value_is_parsed_or_refused(
    parse: Callable[[str], Any], good: dict[str, Any], wrong: list[str]
) -> None:
    assert {text: parse(text) for text in good} == good
    for text in wrong:
        with pytest.raises(ArgumentTypeError):
            parse(text)


def test_any_page_may_send_requests_only_with_a_key() -> None:
    pytest.importorskip("uvicorn", reason="of the extra `serve`")
    with pytest.raises(WrongUsage, match="--http-keys"):
        check_http("127.0.0.1:0", None, ("*",))
    check_http("127.0.0.1:0", None, ("http://localhost:3000",))


def test_file_of_token_ids_holds_a_list_of_them(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    for text, ids in (("[]", ()), ("[0, 2147483647]", (0, 2**31 - 1))):
        path.write_text(text)
        assert read_ids(path) == ids
    for wrong in ("[3, -1]", "[3, 2147483648]", "[true]", "[1.0]", '{"a": 1}', "[", "[" * 100_000):
        path.write_text(wrong)
        with pytest.raises(WrongUsage, match="JSON list of token ids: "):
            read_ids(path)


def test_file_is_read_up_to_the_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\xc3")
    assert read_file(path, 4) == b"a\nb\xc3"
    with pytest.raises(WrongUsage, match="larger"):
        read_file(path, 3)
    with pytest.raises(WrongUsage, match=r"byte 3, line 2"):
        read_text(path)
    for wrong in (tmp_path, tmp_path / "no", Path("\0")):
        with pytest.raises(WrongUsage):
            read_file(wrong)
    check_request(path, Generate(0, prompt="a"))
    with pytest.raises(WrongUsage, match="cannot be sent"):
        check_request(path, Generate(0, prompt="a" * (80 << 20)))


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(file: Path, **entries: object) -> None:
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | entries))


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("generation_config.json", {"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_id"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("config.json", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "short_factor"),
    ],
)
def test_impossible_settings_are_refused_before_loading(folder: Path, file, entries, message) -> None:
    check_engine(EngineConfig(model=folder))
    change(folder / file, **entries)
    with pytest.raises(ModelError, match=message) as failure:
        check_engine(EngineConfig(model=folder))
    assert "\n" not in str(failure.value)


def test_new_file_is_refused_where_none_can_be_made(tmp_path: Path) -> None:
    check_new_file("--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for wrong, words in ((tmp_path, "folder"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(WrongUsage, match=words):
            check_new_file("--out", wrong)
    with pytest.raises(WrongUsage, match=r"(No space left on device|File too large)$"):
        check_new_file("--out", tmp_path / "new", room=1 << 62)
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").touch()
    check_new_file("--out", tmp_path / "old")
    with pytest.raises(WrongUsage, match="exists already"):
        check_new_file("--record", tmp_path / "old", replace=False)


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("8000", "127.0.0.1:8000"),
        ("localhost:1", "127.0.0.1:1"),
        ("*:1", "0.0.0.0:1"),
        ("[::1]:0", "[::1]:0"),
        ("[0:0:0:0:0:0:0:1]:2", "[::1]:2"),
        ("[::ffff:127.0.0.1]:2", "127.0.0.1:2"),
    ],
)
def test_an_address_has_one_form(written: str, means: str) -> None:
    """By which its companion is found, the loopback address of the other family."""
    assert http_address(written) == means
