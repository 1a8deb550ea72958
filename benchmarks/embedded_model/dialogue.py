"""Questions and answers from glossaries, question lists and the NAME lines of manual pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.embedded_model.extract import html_text, man_text, read_text, tidy

LONGEST_ANSWER = 420  # characters; an answer ends with the last sentence that fits
_HTML = "usr/share/doc"
_GLOSSARIES = {
    "python-glossary": f"python3.11-doc/{_HTML}/python3.11/html/glossary.html",
    "postgresql-glossary": f"postgresql-doc-15/{_HTML}/postgresql-doc-15/html/glossary.html",
}
_FAQS = (
    f"python3.11-doc/{_HTML}/python3.11/html/faq/*.html",
    f"debian-faq/{_HTML}/debian/FAQ/*.en.html",
    f"debian-faq-de/{_HTML}/debian/FAQ/de/*.de.html",
    f"debian-faq-fr/{_HTML}/debian/FAQ/fr/*.fr.html",
)
_PERL_FAQS = "perl-doc/usr/share/perl/5.36.0/pod/perlfaq?.pod"
_MANUALS = {
    "What does {} do?": ("manpages*/usr/share/man/man*/*.gz", "coreutils/usr/share/man/man*/*.gz"),
    "Was macht {}?": ("manpages-de*/usr/share/man/de/man*/*.gz",),
    "Que fait {} ?": ("manpages-fr*/usr/share/man/fr/man*/*.gz",),
}


@dataclass(frozen=True)
class Dialogue:
    """Ways to ask one thing, and the answer."""

    source: str
    questions: list[str]
    answer: str


def _shorten(text: str) -> str:
    """The leading paragraphs and sentences that fit into `LONGEST_ANSWER`; empty when none does."""
    text = re.sub(r"\n\n(?:For more information, s|Also s|S)ee(?: also)? .*$", "", text, flags=re.DOTALL)
    text = tidy(re.sub(r"(?<=\S)[ \t]*\n(?=\S)", " ", text)).strip()
    if len(text) <= LONGEST_ANSWER:
        return text.rstrip(":") if not text.endswith(":") else ""
    ends = [found.end() for found in re.finditer(r"[.!?](?=\s)", text[:LONGEST_ANSWER])]
    return text[: ends[-1]] if ends else ""


def _asked(term: str) -> list[str]:
    """Ways to ask for the meaning of a glossary's term; the first is the common one and is listed twice."""
    bare = re.sub(r"\s*\(.*?\)", "", term)
    name = bare if len(bare) < 2 or bare[1].isupper() else bare[0].lower() + bare[1:]
    countless = not name[0].isalpha() or name[1:2].isupper() or name.endswith(("s", "ing", "ity", "ion"))
    article = "" if countless else "an " if name[0] in "aeiou" else "a "
    common = f"What is {article}{name}?"
    return [common, common, f"What is {name}?", f"Explain {name}.", f"Define {article}{name}."]


def _glossary(source: str, page: str) -> Iterator[Dialogue]:
    for term, body in re.findall(r"<dt[^>]*>(.*?)</dt>(.*?)(?=<dt|</dl>)", page, re.DOTALL):
        answer = _shorten(html_text(body))
        if len(answer) > 30 and not answer.startswith("See "):
            yield Dialogue(source, _asked(html_text(term).strip()), answer)


def _faq(page: str) -> Iterator[Dialogue]:
    for heading, body in re.findall(r"<h[2-4][^>]*>(.*?)</h[2-4]>(.*?)(?=<h[1-4]|\Z)", page, re.DOTALL):
        question = re.sub(r"^[\d.]+\s*", "", html_text(heading).strip())
        answer = _shorten(html_text(body))
        if question.endswith("?") and len(answer) > 30:
            yield Dialogue("faq", [question], answer)


def _perl_faq(pod: str) -> Iterator[Dialogue]:
    for question, body in re.findall(r"^=head2 (.*?)\n\n(.*?)(?=^=)", pod, re.DOTALL | re.MULTILINE):
        body = re.sub(r"X<[^>]*>\s*", "", body)
        prose = body.strip().split("\n\n    ")[0] if not body.startswith(" ") else ""
        answer = _shorten(re.sub(r"[A-Z]<+\s*(?:[^|>]*\|)?([^<>]*?)\s*>+", r"\1", prose))
        if question.strip().endswith("?") and len(answer) > 30:
            yield Dialogue("faq", [" ".join(question.split())], answer)


def _manual(question: str, page: str) -> Iterator[Dialogue]:
    found = re.search(r"^\S+.*\n((?: +.+\n)+)", page)
    parts = re.split(r" +[-–—] +", " ".join(found.group(1).split()), maxsplit=1) if found else []
    if len(parts) == 2 and 12 < len(parts[1]) < 200:
        name = parts[0].split(",")[0]
        answer = f"{name}: {parts[1].rstrip('.')}."
        yield Dialogue("manual", [question.format(name), question.format(f"`{name}`")], answer)


def dialogues(cache: Path, heldout: set[str]) -> list[Dialogue]:
    """Every question and answer below `cache` that no held-out document (by name) contains."""

    def pages(*globs: str) -> Iterator[Path]:
        for path in sorted({path for glob in globs for path in cache.glob(glob)}):
            if path.is_file() and not path.is_symlink() and path.relative_to(cache).as_posix() not in heldout:
                yield path

    found: list[Dialogue] = []
    for source, name in _GLOSSARIES.items():
        for path in pages(name):
            found += _glossary(source, read_text(path))
    for path in pages(*_FAQS):
        found += _faq(read_text(path))
    for path in pages(_PERL_FAQS):
        found += _perl_faq(read_text(path))
    for question, globs in _MANUALS.items():
        for path in pages(*globs):
            found += _manual(question, man_text(path, cache / "mandoc/usr/bin/mandoc"))
    return found
