"""The text process as it is executed, and its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from streams import rendered

from pipeline.assets import model_dir
from pipeline.text import process as text_process
from pipeline.text.detokenizer import DECODER, Detokenizer
from pipeline.text.process import encoded
from pipeline.text.tokenizer import LOAD_FAILURES, Tokenizer
from protocol.codec import decode, encode
from protocol.messages import VERSION, ChatMessage, Encode, Encoded, Ready
from protocol.sockets import Identity, bind_router, ipc_endpoint, parse_identity
from workers.lifetime import pack_config

ROOT = Path(__file__).resolve().parents[2]
KEY, IDENTITY = b"k" * 32, Identity("text", 0, 3)
TEXTS = ("def add(a, b):", "", "é" * 9)
TURN = ChatMessage("user", "What is a list?")


def received(socket: zmq.Socket[bytes], *kinds: type) -> list[Any]:
    found = []
    for kind in kinds:
        assert socket.poll(20_000)
        sender, *frames = socket.recv_multipart()
        assert parse_identity(sender, KEY) == IDENTITY
        found.append(decode(frames))
        assert isinstance(found[-1], kind)
    return found


def test_executed_process_answers_and_holds_no_file_of_the_program_that_started_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    planted = tmp_path / "planted"
    planted.touch()
    for_child, lifeline = os.pipe()
    config = asdict(IDENTITY) | {
        "identity": IDENTITY.prove(KEY),
        "runtime": str(tmp_path),
        "fingerprint": "",
        "model": str(model_dir()),
    }
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    with zmq.Context() as context, planted.open() as inherited:
        sockets = [
            bind_router(context, ipc_endpoint(tmp_path, name)) for name in ("text.sock", "control.sock")
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "workers.child", text_process.__name__, "--lifeline", str(for_child)],
            pass_fds=(for_child, inherited.fileno()),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as process:
            try:
                os.write(lifeline, pack_config(config))
                for socket in sockets:
                    (ready,) = received(socket, Ready)
                    assert ready == Ready(VERSION, "text", 0, 3, process.pid, "")
                files = Path(f"/proc/{process.pid}/fd")
                assert str(planted) not in [os.readlink(files / number) for number in os.listdir(files)]
                decoder = Detokenizer.read(tmp_path / DECODER)
                answers = []
                for asked in (*map(Encode, TEXTS), Encode(messages=(TURN,))):  # one after the other, as ever
                    sockets[0].send_multipart([IDENTITY.prove(KEY), *encode(asked)])
                    answers += received(sockets[0], Encoded)
                *of_texts, of_turns = answers
            finally:
                os.close(lifeline)  # the process exits
                os.close(for_child)
                for socket in sockets:
                    socket.close(linger=0)
    parts = [tokenizer.encode(text) for text in TEXTS]
    assert [(answer.ids.tolist(), answer.error) for answer in of_texts] == [(part, "") for part in parts]
    assert [decoder.decode(part) for part in parts] == list(TEXTS)
    assert of_turns.ids.tolist() == rendered(tokenizer, [TURN])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (MemoryError(), "the text takes too much memory to encode"),
        (ValueError("half of\n a \ud800"), "the model's tokenizer failed: half of a ?"),
        (GeneratorExit(), "the model's tokenizer failed: GeneratorExit"),  # no Exception, as a panic is none
        ([1] * 9, "the text has 9 tokens, more than 8"),
    ],
)
def test_texts_that_cannot_be_encoded_are_answered_by_a_line(result: Any, reason: str, monkeypatch) -> None:
    monkeypatch.setattr(text_process, "MOST_IDS", 8)

    def fake(text: str) -> list[int]:
        if isinstance(result, BaseException):
            raise result
        return cast(list[int], result)

    answer = encoded(cast(Tokenizer, SimpleNamespace(encode=fake)), Encode("a"))
    assert (answer.ids.tolist(), answer.error) == ([], reason)
    encode(answer)


@pytest.mark.parametrize(
    ("normalizer", "token", "words"),
    [
        ({"Regex": "(?:a|a)*$"}, ("a" * 20 + "b") * 20_000, "took longer than 20 s to load"),
        ({"String": "a"}, "a" * 200, "failed to load, or needs more than 4 GB of memory"),
    ],
)
def test_tokenizer_that_does_not_end_or_fills_the_memory_ends_the_process(
    tmp_path: Path, normalizer: dict[str, str], token: str, words: str
) -> None:
    """By the signals that the supervisor knows. Lower limits: a second, 256 MB."""
    described = json.loads((model_dir() / "tokenizer.json").read_text())
    content = "x" * 5_000_000 if "String" in normalizer else "x"
    described["normalizer"] = {"type": "Replace", "pattern": normalizer, "content": content}
    described["added_tokens"].append(
        described["added_tokens"][0] | {"id": 512, "content": token, "normalized": True}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    code = (
        "from pathlib import Path; from pipeline.text import process\n"
        "process.LOAD_SECONDS, process.MEMORY = 1, 1 << 28\n"
        f"process._load(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert LOAD_FAILURES[ended.returncode] == words
