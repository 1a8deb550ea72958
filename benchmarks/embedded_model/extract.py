"""Plain text out of the file formats that documentation packages carry."""

from __future__ import annotations

import gzip
import re
import subprocess
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

_BLOCK = frozenset(
    "p div section article h1 h2 h3 h4 h5 h6 ul ol li dl dt dd table tr pre blockquote figure br hr".split()
)
_SKIP_TAGS = frozenset("head script style nav footer svg form button".split())
# Navigation of the DocBook, Sphinx, Publican and SQLite page layouts: the same words on every page.
_SKIP_CLASSES = frozenset(
    "navheader navfooter sphinxsidebar related footer docnav toc headerlink nosearch menu mobilemenu "
    "desktoponly hidden fancy_toc indexterm contents mobileonly tightmenu rst-footer-buttons".split()
)
_VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
_BOILERPLATE = re.compile(
    r"^(?:COLOPHON|AUTHORS?|COPYRIGHT|REPORTING BUGS|BUGS MELDEN|FEHLER MELDEN|AUTOR(?:EN)?|ÜBERSETZUNG|"
    r"TRADUCTION|AUTEURS?|SIGNAL(?:ER|EMENT) DES BOGUES|DROITS? D'AUTEUR|KOLOPHON|DANKSAGUNGEN?)$"
)


class _TextParser(HTMLParser):
    """Collects the readable text of one page; preformatted blocks keep their line breaks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._stack: list[str] = []
        self._skip_from = 0  # depth at which a skipped element was opened; 0: not skipping
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._skip_from:
            if tag in _BLOCK:
                self.parts.append("\n\n" if tag not in ("li", "tr", "br", "dd", "dt") else "\n")
            if tag == "li":
                self.parts.append("- ")
            if tag in ("td", "th"):
                self.parts.append(" ")
        if tag in _VOID:
            return
        self._stack.append(tag)
        classes = set((dict(attrs).get("class") or "").split())
        if not self._skip_from and (tag in _SKIP_TAGS or classes & _SKIP_CLASSES):
            self._skip_from = len(self._stack)
        self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._stack:
            return
        while self._stack:  # elements with an optional end tag close with their parent
            top = self._stack.pop()
            self._pre -= top == "pre"
            if self._skip_from > len(self._stack):
                self._skip_from = 0
            if top == tag:
                break
        if tag in _BLOCK and not self._skip_from:
            self.parts.append("\n" if tag in ("li", "tr", "dt", "dd") else "\n\n")

    def handle_data(self, data: str) -> None:
        if self._skip_from:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1][-1:].isspace():
                data = data.lstrip()
        if data:
            self.parts.append(data)


def tidy(text: str) -> str:
    """Normalise (NFC), drop control characters and trailing blanks, allow one empty line in a row."""
    text = unicodedata.normalize("NFC", text).replace("\u00a0", " ").replace("\u00b6", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b\ufeff]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_text(page: str) -> str:
    """Readable text of an HTML page without its navigation."""
    parser = _TextParser()
    parser.feed(page)
    parser.close()
    text = re.sub(r"^- \n+", "- ", "".join(parser.parts), flags=re.MULTILINE)
    notices = re.compile(r"^(?:This page last modified on .*|Download the ebook)$", re.MULTILINE)
    return tidy(notices.sub("", text))


def read_text(path: Path) -> str:
    """A file's text; gzip is undone, and Latin-1 is the fallback of broken UTF-8."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def man_text(path: Path, mandoc: Path) -> str:
    """A manual page as rendered text, without running heads and without licence and translator notes."""
    source = read_text(path)
    if re.match(r"\.so\s", source):
        return ""
    command = [str(mandoc), "-Kutf-8", "-Tutf8", "-Owidth=78,indent=4"]
    done = subprocess.run(command, input=source.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rendered = re.sub(r".\x08", "", done.stdout.decode("utf-8", "replace"))  # overstrikes mark bold
    lines = rendered.split("\n")[1:]
    while lines and not lines[-1].strip():
        lines.pop()
    kept: list[str] = []
    keep = True
    for line in lines[:-1]:
        if line[:1].strip():
            keep = not _BOILERPLATE.match(line.strip())
        if keep:
            kept.append(line)
    return tidy("\n".join(kept))
