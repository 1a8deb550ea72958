"""Token streams of each kind of text, and batches mixed from them."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.embedded_model.corpus import load
from benchmarks.embedded_model.sources import KINDS

BOS, EOS = 0, 1
IGNORED = -100  # target of a token that is not trained
DIALOGUE_SHARE = 0.05  # of the rows; most of it repeats glossary entries
DIALOGUE_SOURCES = {"python-glossary": 0.5, "postgresql-glossary": 0.15, "faq": 0.15, "manual": 0.2}
SYSTEM_MESSAGES = ("You answer questions about software.", "Answer briefly.", "You are a helpful assistant.")
SYSTEM_SHARE = 0.15

Ids = NDArray[np.int64]


def encode(corpus: Path, tokenizer: Tokenizer) -> None:
    """Write `corpus`/<kind>.npy: each document between <s> and </s>, as uint16 token ids."""
    for kind in KINDS:
        encoded = tokenizer.encode_batch(load(corpus, kind), add_special_tokens=False)
        parts = [part for item in encoded for part in ([BOS], item.ids, [EOS])]
        np.save(corpus / f"{kind}.npy", np.concatenate([np.asarray(part, np.uint16) for part in parts]))


def read_tokens(corpus: Path, kind: str) -> NDArray[np.uint16]:
    """The training tokens of `kind`, document after document."""
    tokens: NDArray[np.uint16] = np.load(corpus / f"{kind}.npy", allow_pickle=False)
    return tokens


class Stream:
    """Endless pieces of one kind's tokens in random order; a pass yields every piece once.

    Neighbouring rows come from different documents: read in sequence, a long document would fill every batch
    for hundreds of steps, and the model would forget the others.
    """

    def __init__(self, tokens: NDArray[np.uint16], rng: np.random.Generator) -> None:
        self._tokens = tokens
        self._rng = rng
        self._starts: list[int] = []
        self._count = 0
        self.passes = 0.0  # over the tokens so far

    def take(self, count: int) -> Ids:
        """The next `count` tokens."""
        if not self._starts or count != self._count:
            first = int(self._rng.integers(count))  # each pass has other boundaries
            starts = np.arange(first, self._tokens.size - count, count)
            self._starts, self._count = self._rng.permutation(starts).tolist(), count
        start = self._starts.pop()
        self.passes += count / self._tokens.size
        return self._tokens[start : start + count].astype(np.int64)


class Dialogues:
    """Rows of whole dialogues in the chat template's form; only answers and their end tokens are targets."""

    def __init__(self, path: Path, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self._rng = rng
        self._tokenizer = tokenizer
        self._by_source: dict[str, list[tuple[list[str], str]]] = {source: [] for source in DIALOGUE_SOURCES}
        with path.open(encoding="utf-8") as lines:
            for talk in map(json.loads, lines):
                self._by_source[talk["source"]].append((talk["questions"], talk["answer"]))

    def _sample(self) -> tuple[list[int], list[int]]:
        names = list(DIALOGUE_SOURCES)
        found = self._by_source[names[self._rng.choice(len(names), p=list(DIALOGUE_SOURCES.values()))]]
        questions, answer = found[self._rng.integers(len(found))]
        question = questions[self._rng.integers(len(questions))]
        system = ""
        if self._rng.random() < SYSTEM_SHARE:
            system = f"<|system|>{SYSTEM_MESSAGES[self._rng.integers(len(SYSTEM_MESSAGES))]}<|end|>"
        text = f"<s>{system}<|user|>{question}<|end|><|assistant|>"
        prompt = self._tokenizer.encode(text, add_special_tokens=False).ids
        reply = self._tokenizer.encode(f"{answer}<|end|>", add_special_tokens=False).ids
        return prompt + reply, [IGNORED] * len(prompt) + reply

    def take(self, length: int) -> tuple[Ids, Ids]:
        """Inputs and targets, both (length,)."""
        tokens: list[int] = []
        targets: list[int] = []
        while len(tokens) <= length:
            more_tokens, more_targets = self._sample()
            tokens += more_tokens
            targets += more_targets
        return np.asarray(tokens[:length], np.int64), np.asarray(targets[1 : length + 1], np.int64)


class Mixture:
    """Batches of rows that each come from one kind, of each as many."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.streams = {kind: Stream(read_tokens(corpus, kind), self._rng) for kind in KINDS}
        self.dialogues = Dialogues(corpus / "dialogues.jsonl", tokenizer, self._rng)
        self._kinds = cycle(KINDS)

    def take(self, rows: int, length: int) -> tuple[Ids, Ids]:
        """Inputs and targets, both (rows, length)."""
        inputs, targets = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
        for row in range(rows):
            if self._rng.random() < DIALOGUE_SHARE:
                inputs[row], targets[row] = self.dialogues.take(length)
            else:
                tokens = self.streams[next(self._kinds)].take(length + 1)
                inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return inputs, targets
