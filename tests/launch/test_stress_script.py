"""Scripts of `stress`: their fields, and the one-line error for an invalid script; the options of --chaos."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from expected_errors import expect_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.assets import stress_script
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.stress.chaos import Chaos
from launch.stress.load import Entry, read_script
from pipeline.assets import model_dir
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import ChatMessage


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.jsonl"


def test_every_field_is_read(script: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A list?"}]
    lines = [
        {"prompt": ""},
        {"name": "a chat", "messages": messages, "max_tokens": 5, "temperature": 1, "seed": 0, "delay": 0.25},
        {"turns": ["one", "two"], "cancel_after": 0},
    ]
    script.write_text("\n\n".join(json.dumps(line) for line in lines) + "\r\n \n")
    chat = (ChatMessage("system", "Be brief."), ChatMessage("user", "A list?"))
    assert read_script(script) == [
        Entry("line 1", prompt=""),
        Entry("a chat", messages=chat, max_tokens=5, temperature=1.0, seed=0, delay=0.25),
        Entry("line 5", turns=("one", "two"), cancel_after=0),
    ]


WRONG = [
    ('{"prompt": "a"', ["not JSON", "truncated"]),
    ("[" * 100_000, ["array"]),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ["seed", "range"]),
    ("{}", ["exactly one of prompt, messages, turns"]),
    ('{"prompt": "a", "turns": ["b"]}', ["exactly one"]),
    ('{"prompt": "a", "max_token": 3}', ["max_token", "max_tokens"]),
    ('{"prompt": "a", "max_tokens": 0}', ["max_tokens", ">= 1"]),
    ('{"prompt": "a", "temperature": -1}', ["temperature", ">= 0"]),
    ('{"prompt": "a", "delay": 1e9}', ["delay", "600"]),
    ('{"prompt": "a", "name": "two\\nlines"}', ["name"]),
    ('{"prompt": "\\ud800"}', ["not JSON"]),
    ('{"messages": [{"role": "user"}]}', ["messages", "content"]),
    ('{"turns": "a"}', ["turns", "array"]),
    ('{"prompt": "' + "long " * 1_000_000 + '"}', ["cannot be sent"]),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line[:40] for line, _ in WRONG])
def test_invalid_line_is_one_error_line_before_any_engine_starts(line, words, script, complaint) -> None:
    script.write_text('{"prompt": "good"}\n\n' + line + "\n")
    err = complaint("stress", "--script", str(script))
    assert err.startswith(f"{script}, line 3: ")
    assert len(err) < 288 + len(str(script))
    for word in words:
        assert word in err


def test_invalid_files_are_refused(tmp_path: Path, complaint: Callable[..., str]) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}\n')
    words = {"empty": "no request", "latin": "UTF-8", "missing": "No such file"}
    for name, word in words.items():
        line = complaint("stress", "--script", str(tmp_path / name))
        assert str(tmp_path / name) in line
        assert word in line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*Entry.__struct_fields__, "role", "Prompt"])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(FIELDS, JSON | st.integers(0, 9) | st.lists(st.text(max_size=3), max_size=2)))
def test_any_object_is_an_entry_or_one_error_line(script: Path, fields: dict[str, object]) -> None:
    script.write_text(json.dumps(fields))
    error = None
    try:
        (entry,) = read_script(script)
    except WrongUsage as e:
        error = str(e)
    if error is None:
        assert [entry.prompt, entry.messages, entry.turns].count(None) == 2
        assert entry.max_tokens >= 1
        assert entry.delay >= 0
    else:
        assert error.startswith(f"{script}, line 1: ")
        assert "\n" not in error


def test_shipped_script_covers_all_kinds_of_requests() -> None:
    entries = read_script(stress_script())
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    assert len({(e.prompt, e.messages, e.turns) for e in entries}) >= 64
    assert len({e.name for e in entries}) == len(entries)
    lengths = {len(tokenizer.encode(e.prompt)) for e in entries if e.prompt is not None}
    assert {900, 1000, 1023, 1024, 1025} <= lengths  # the context is 1024
    assert any(e.prompt and not e.prompt.strip() for e in entries)
    assert any(e.messages and len(e.messages) >= 20 for e in entries)
    assert {2, 3, 4, 5} <= {len(e.turns) for e in entries if e.turns}
    assert {0, 1, 3, 10, 40} <= {e.cancel_after for e in entries}
    assert sum(e.temperature > 0 for e in entries) >= 5
    assert any(e.delay for e in entries)


def test_chaos_options() -> None:
    def asked(*words: str) -> Chaos | None:
        return Chaos.asked(parse(["stress", *words]).written, 5)

    assert asked() is None
    assert asked("--chaos", "kill, stop,kill") == Chaos(("kill", "stop"), 1.0, 5)
    assert asked("--chaos", "corrupt", "--chaos-rate", "0.3") == Chaos(("corrupt",), 0.3, 5)
    known = r"\(kill, stop, corrupt\)$"
    for wrong, line in (("kil", f"^--chaos: unknown kind 'kil'; did you mean kill. {known}"), ("", known)):
        expect_error(WrongUsage, asked, "--chaos", wrong, match=line)
    with pytest.raises(WrongUsage, match=r"^--chaos-rate belongs to --chaos \(stress"):
        asked("--chaos-rate", "2")
    assert parse(["stress", "--chaos", "kill", "--seed", "3", "--connect"]).config().seed == 3
    with pytest.raises(WrongUsage, match=r"^--seed does not change a running engine"):
        parse(["stress", "--seed", "3", "--connect"])
