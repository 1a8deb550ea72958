"""The parts of `benchmarks/embedded_model` whose mistakes a loss curve would not show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.embedded_model.batches import IGNORED, Dialogues, Stream
from benchmarks.embedded_model.corpus import Document, split
from benchmarks.embedded_model.extract import html_text
from benchmarks.embedded_model.model import Model, Shape
from benchmarks.embedded_model.tokenizer import VOCABULARY
from pipeline.assets import model_dir


def test_html_text_keeps_prose_and_code_and_drops_navigation() -> None:
    page = """<html><head><title>T</title><style>p {}</style></head><body><div class="navheader">Next</div>
    <h1>Title</h1><p>One  <b>two</b>
    three.</p><ul><li><p>Item</p></li></ul><pre>if x:
    y()</pre><div class="navfooter"><p>Prev<br></p></div><p>End</p></body></html>"""
    assert html_text(page) == "Title\n\nOne two three.\n\n- Item\n\nif x:\n    y()\n\nEnd\n"


def test_training_text_lacks_heldout_and_repeated_paragraphs() -> None:
    shared = "This paragraph occurs in more than one document, word for word, and is long enough to count."
    kept = "\n\n".join(f"Paragraph {i} of a training document, which nothing else repeats." for i in range(9))
    heldout = Document("english", "a", "\n\n".join([shared, "x " * 800]))
    # Too long to be held out, so both of these are for training.
    first = Document("english", "b", "\n\n".join([shared, kept, "y " * 8000]))
    second = Document("french", "c", "\n\n".join([kept, "z " * 8000]))
    training, held = split(iter([heldout, first, second]))
    assert [doc.name for doc in held["english"]] == ["a"]
    assert shared not in training["english"][0].text
    assert kept in training["english"][0].text
    assert "Paragraph" not in training["french"][0].text


def test_stream_yields_every_piece_once_a_pass() -> None:
    stream = Stream(np.arange(1000, dtype=np.uint16), np.random.default_rng(5))
    pieces = [stream.take(100) for _ in range(9)]
    firsts = sorted(int(piece[0]) for piece in pieces)
    assert firsts == list(range(firsts[0], firsts[0] + 900, 100))
    assert all((np.diff(piece) == 1).all() for piece in pieces)


def test_targets_are_answers_and_their_end(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.jsonl"
    sources = ("python-glossary", "postgresql-glossary", "faq", "manual")
    talks = [{"source": source, "questions": ["What is it?"], "answer": "A thing."} for source in sources]
    path.write_text("\n".join(json.dumps(talk) for talk in talks) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    inputs, targets = Dialogues(path, tokenizer, np.random.default_rng(1)).take(64)
    trained = targets != IGNORED
    assert (targets[:-1][trained[:-1]] == inputs[1:][trained[:-1]]).all()
    text = tokenizer.decode(targets[trained].tolist(), skip_special_tokens=False)
    assert text.startswith("A thing.<|end|>A thing.<|end|>")


def test_every_weight_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = Model(Shape(num_hidden_layers=2))
    tokens = torch.randint(0, VOCABULARY, (4, 65))
    even = torch.full((2, 8), 1 / 8)
    losses = model.losses(tokens[:, :-1], tokens[:, 1:], even)
    (losses.text + losses.balance).backward()
    assert int(losses.counts.sum()) == 2 * 4 * 64 * 2
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
