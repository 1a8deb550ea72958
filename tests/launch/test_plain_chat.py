"""The chat from a pipe, and models that cannot chat."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from engines import LIMIT, engines_left, run

from launch.cli import main
from launch.command_line.checks import check_reads_text
from launch.errors import WrongUsage
from pipeline.assets import model_dir

TALK = """What is a generator?
/policy
/policy random churn=1
/stats
/reset
/retry
/polcy
exit
never asked
"""


def test_commands_from_a_pipe_are_executed_and_stdout_holds_answers_alone(tiny_model: Path) -> None:
    model = ("--model", str(tiny_model), "--log-level", "warning", "--name", "plain-chat")
    code, out, err = run(*model, "--max-tokens", "4", "--ignore-eos", "--workers", "0", written=TALK)
    assert code == 1
    assert "/" not in out
    assert "policy" not in out
    assert out.count("\n") >= 1
    assert re.search(r"^\* all-host +All experts on the host", err, re.M)
    assert re.search(r"^policy: random churn=1$", err, re.M)
    assert re.search(r"^decode  ", err, re.M)
    complaints = re.findall(r"^launch\.py: (.*)$", err, re.M)
    assert len(complaints) == 2
    assert complaints[0] == "nothing has been asked yet"
    assert complaints[1].startswith("unknown command /polcy; did you mean /policy?")
    assert "\x1b" not in err
    assert re.search(r"^4 tokens · .* cut\s+at\s+max_tokens$", err, re.M)
    assert engines_left() == []


@pytest.mark.parametrize(
    ("missing", "expected"), [("tokenizer.json", "no tokenizer"), ("chat_template.jinja", "no chat template")]
)
def test_model_that_cannot_chat_is_refused_before_it_is_loaded(tmp_path, missing: str, expected: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir(), folder)
    check_reads_text(folder, chats=True)
    (folder / missing).unlink()
    settings = folder / "tokenizer_config.json"
    others = {key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"}
    settings.write_text(json.dumps(others))
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")  # would be refused by the loader
    began = time.monotonic()
    code, out, err = run("--model", str(folder), written="Hi?\n")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err
    assert "generate" in err
    assert time.monotonic() - began < LIMIT / 4


def test_whether_a_model_can_chat_is_seen_without_loading_its_tokenizer(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir(), tmp_path / "model"))
    (folder / "tokenizer.json").write_text("not one: the loader says so")
    settings = folder / "tokenizer_config.json"
    others = {key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"}
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings.write_text(json.dumps(others | {"chat_template": [{"name": "default", "template": template}]}))
    check_reads_text(folder, chats=True)
    settings.write_text(json.dumps(others | {"chat_template": [{"name": "rag", "template": template}]}))
    with pytest.raises(WrongUsage, match="no chat template"):
        check_reads_text(folder, chats=True)


@pytest.mark.parametrize(
    "command", ["score --text", "calibrate --text", "evaluate --items", "stress --script"]
)
def test_commands_that_read_texts_need_a_tokenizer_before_they_start(command: str, tmp_path, capsys) -> None:
    folder, text = tmp_path / "model", tmp_path / "text"
    folder.mkdir()
    shutil.copy(model_dir() / "config.json", folder)
    text.write_text('{"prompt": "a"}')
    assert main([*command.split(), str(text), "--model", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no tokenizer" in err
    assert ("--tokens" in err) is ("--text" in command)
