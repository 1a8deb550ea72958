"""Training and held-out text of seven kinds from Debian packages.

The packages are fetched with `apt-get download`, unpacked with `dpkg -x` (nothing is installed) and
converted to plain text. Whole documents are held out; their names alone decide which.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

from benchmarks.embedded_model.dialogue import dialogues
from benchmarks.embedded_model.extract import html_text, man_text, read_text, tidy
from benchmarks.embedded_model.sources import KINDS, LICENCES, PACKAGES, SOURCES, UNWANTED
from pipeline.assets import model_dir

HELDOUT_CHARS = 60_000  # per kind, about
HELDOUT_DOCUMENT = (1_500, 14_000)  # characters; several documents make a kind's held-out text
LARGEST_KIND = 5_500_000  # characters; the rest is left out, so that no kind dominates the vocabulary


@dataclass(frozen=True)
class Document:
    """One source file as text."""

    kind: str
    name: str  # path below the folder of unpacked packages
    text: str


def fetch(cache: Path) -> dict[str, str]:
    """Download and unpack every package below `cache`; returns package -> version."""
    cache.mkdir(parents=True, exist_ok=True)
    versions = {}
    for package in PACKAGES:
        if not list(cache.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=cache, check=True)
        archive = sorted(cache.glob(f"{package}_*.deb"))[-1]
        if not (cache / package).is_dir():
            subprocess.run(["dpkg", "-x", str(archive), str(cache / package)], check=True)
        query = ["dpkg-deb", "-f", str(archive), "Version"]
        versions[package] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return versions


def _extract(job: tuple[str, Path, Path]) -> Document:
    kind, path, root = job
    if path.suffix == ".gz":
        text = man_text(path, root / "mandoc/usr/bin/mandoc")
    elif path.suffix == ".html":
        text = html_text(read_text(path))
    else:
        text = tidy(read_text(path))
    return Document(kind, path.relative_to(root).as_posix(), text)


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def documents(cache: Path) -> Iterator[Document]:
    """Every wanted document, kind by kind, in an order that only the names decide."""
    jobs = []
    for kind in KINDS:
        paths = {path for glob in SOURCES[kind] for path in cache.glob(glob) if path.is_file()}
        wanted = (path for path in paths if not path.is_symlink() and not UNWANTED.search(path.as_posix()))
        ordered = sorted(wanted, key=lambda path: _rank(path.relative_to(cache).as_posix()))
        jobs += [(kind, path, cache) for path in ordered]
    with Pool(2) as pool:
        yield from pool.imap(_extract, jobs, chunksize=8)


def _paragraphs(text: str) -> list[str]:
    return text.split("\n\n")


def _key(paragraph: str) -> bytes:
    return hashlib.sha256(re.sub(r"\W+", " ", paragraph.lower()).encode()).digest()[:12]


def split(found: Iterator[Document]) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Training and held-out documents per kind.

    A paragraph counts once over all kinds: repeated notices, untranslated passages of translations and
    whatever a held-out document contains leave the training text.
    """
    heldout: dict[str, list[Document]] = defaultdict(list)
    rest: dict[str, list[Document]] = defaultdict(list)
    held_chars: dict[str, int] = defaultdict(int)
    for doc in found:
        low, high = HELDOUT_DOCUMENT
        if held_chars[doc.kind] < HELDOUT_CHARS and low <= len(doc.text) <= high:
            heldout[doc.kind].append(doc)
            held_chars[doc.kind] += len(doc.text)
        else:
            rest[doc.kind].append(doc)
    seen = {_key(p) for docs in heldout.values() for d in docs for p in _paragraphs(d.text) if len(p) >= 60}
    training: dict[str, list[Document]] = {}
    for kind in KINDS:
        chars = 0
        training[kind] = []
        for doc in rest[kind]:
            kept = []
            for paragraph in _paragraphs(doc.text):
                key = _key(paragraph)
                if len(paragraph) < 60 or key not in seen:
                    kept.append(paragraph)
                    seen.add(key)
            text = tidy("\n\n".join(kept))
            if len(text) >= 400 and chars < LARGEST_KIND:
                training[kind].append(Document(kind, doc.name, text))
                chars += len(text)
    return training, dict(heldout)


def build(cache: Path, out: Path, heldout_out: Path) -> None:
    """Write `out`/<kind>.jsonl (one document a line), the held-out files, and `out`/sources.json."""
    versions = fetch(cache)
    training, heldout = split(documents(cache))
    out.mkdir(parents=True, exist_ok=True)
    heldout_out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"packages": versions}
    origins = ["# Held-out text", "", "Whole documents, each under its own licence.", ""]
    origins += ["| Kind | Package | Document | Licence |", "|---|---|---|---|"]
    for kind in KINDS:
        lines = [json.dumps({"name": d.name, "text": d.text}, ensure_ascii=False) for d in training[kind]]
        (out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        held = sorted(heldout[kind], key=lambda d: _rank(d.name))
        (heldout_out / f"{kind}.txt").write_text("\n".join(d.text for d in held), encoding="utf-8")
        for doc in held:
            package = doc.name.split("/")[0]
            cells = (kind, f"{package} {versions[package]}", f"`{Path(doc.name).name}`", LICENCES[package])
            origins.append("| " + " | ".join(cells) + " |")
        summary[kind] = {
            "training_documents": len(training[kind]),
            "training_characters": sum(len(d.text) for d in training[kind]),
            "heldout_characters": sum(len(d.text) for d in heldout[kind]),
            "heldout_documents": sorted(d.name for d in heldout[kind]),
        }
    (heldout_out / "SOURCES.md").write_text("\n".join(origins) + "\n", encoding="utf-8")
    talks = dialogues(cache, {d.name for docs in heldout.values() for d in docs})
    lines = [json.dumps(asdict(talk), ensure_ascii=False) for talk in talks]
    (out / "dialogues.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary["dialogues"] = dict(sorted(Counter(talk.source for talk in talks).items()))
    (out / "sources.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def load(corpus: Path, kind: str) -> list[str]:
    """The training documents of `kind` as texts."""
    with (corpus / f"{kind}.jsonl").open(encoding="utf-8") as lines:
        return [str(json.loads(line)["text"]) for line in lines]


def main() -> None:
    """Command line: `python -m benchmarks.embedded_model.corpus --cache DIR --out DIR`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, default=model_dir().parent / "heldout")
    args = parser.parse_args()
    build(args.cache, args.out, args.heldout)


if __name__ == "__main__":
    main()
