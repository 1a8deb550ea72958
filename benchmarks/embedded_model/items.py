"""Writes the items of `launch.py evaluate` from the embedded model's held-out text.

Two kinds of item for each kind of text. *Ending*: CONTEXT characters of a document, and four endings of which
one is the document's, the others are from elsewhere in the same text. *Word*: the next word occurred in the
context already; the others are three more words of the context. Chosen by a seed; the same text gives the
same items.

    python -m benchmarks.embedded_model.items --out pipeline/assets/items.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from random import Random
from typing import Any

from pipeline.assets import heldout

SEED = 16
EACH = 36  # items of either kind and kind of text
CONTEXT = 240  # characters
ENDING = 48  # characters
CHOICES = 4
LONG_WORD = re.compile(r"(?<![^\W_])[^\W\d_]{5,}(?![^\W_])")
TRIES = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    lines = []
    for kind, path in heldout().items():
        text = path.read_text(encoding="utf-8")
        random = Random(f"{SEED} {kind}")
        lines += [ending(text, kind, random) for _ in range(EACH)]
        lines += words(text, kind, random)
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _word_start(text: str, near: int) -> int:
    """The next position from `near` on at which a space precedes a word."""
    while not (text[near] == " " and text[near + 1].isalnum() and text[near - 1] != " "):
        near += 1
    return near


def _place(text: str, random: Random) -> int:
    return _word_start(text, random.randrange(CONTEXT, len(text) - 3 * ENDING))


def _ending(text: str, start: int) -> str:
    return text[start : _word_start(text, start + ENDING)]


def ending(text: str, kind: str, random: Random) -> dict[str, Any]:
    start = _place(text, random)
    right = _ending(text, start)
    wrong: list[str] = []
    while len(wrong) < CHOICES - 1:
        other = _ending(text, _place(text, random))
        if other not in (right, *wrong) and text[start - CONTEXT : start] + other not in text:
            wrong.append(other)
    return _item(f"{kind}, ending", text[start - CONTEXT : start], right, wrong, random)


def words(text: str, kind: str, random: Random) -> list[dict[str, Any]]:
    """EACH items, at different places."""
    found: list[dict[str, Any]] = []
    used: set[int] = set()
    for _ in range(TRIES):
        start = _place(text, random)
        word = LONG_WORD.match(text, start + 1)
        context = text[start - CONTEXT : start]
        seen = list(dict.fromkeys(LONG_WORD.findall(context)))
        if start in used or word is None or word[0] not in seen or len(seen) < CHOICES:
            continue
        used.add(start)
        possible = [f" {other}" for other in seen if other != word[0] and f"{context} {other}" not in text]
        others = random.sample(possible, min(len(possible), CHOICES - 1))
        if len(others) == CHOICES - 1:
            found.append(_item(f"{kind}, word", context, f" {word[0]}", others, random))
        if len(found) == EACH:
            return found
    raise SystemExit(f"{kind}: only {len(found)} words that occurred before")


def _item(kind: str, context: str, right: str, wrong: list[str], random: Random) -> dict[str, Any]:
    choices = [right, *wrong]
    random.shuffle(choices)
    return {"kind": kind, "context": context, "choices": choices, "answer": choices.index(right)}


if __name__ == "__main__":
    main()
