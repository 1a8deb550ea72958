"""The Debian packages and files of each kind of text."""

from __future__ import annotations

import re

KINDS = ("english", "python", "manual", "sql", "perl", "german", "french")

_DOC = "usr/share/doc"
_HANDBOOK = f"debian-handbook/{_DOC}/debian-handbook/html"
_PYDOC = f"python3.11-doc/{_DOC}/python3.11/html"
_STDLIB = "libpython3.11-stdlib/usr/lib/python3.11"
_MINIMAL = "libpython3.11-minimal/usr/lib/python3.11"

# kind -> globs below the folder of unpacked packages; a glob's first part names the package
SOURCES: dict[str, tuple[str, ...]] = {
    "english": (
        f"{_HANDBOOK}/en-US/*.html",
        "debian-reference-en/usr/share/debian-reference/*.en.html",
        "developers-reference/usr/share/developers-reference/*.html",
        f"debian-policy/{_DOC}/debian-policy/policy.html/*.html",
        f"debian-faq/{_DOC}/debian/FAQ/*.en.html",
        *(f"{_PYDOC}/{part}/*.html" for part in ("tutorial", "howto", "faq", "reference", "whatsnew")),
        f"git-doc/{_DOC}/git-doc/howto/*.html",
        f"git-doc/{_DOC}/git-doc/git*tutorial*.html",
        f"git-doc/{_DOC}/git-doc/user-manual.html",
    ),
    "python": (f"{_STDLIB}/**/*.py", f"{_MINIMAL}/**/*.py"),
    "manual": (
        "manpages/usr/share/man/man*/*.gz",
        "manpages-dev/usr/share/man/man*/*.gz",
        "coreutils/usr/share/man/man*/*.gz",
    ),
    "sql": (f"postgresql-doc-15/{_DOC}/postgresql-doc-15/html/*.html", f"sqlite3-doc/{_DOC}/sqlite3/*.html"),
    "perl": ("perl-doc/usr/share/perl/5.36.0/pod/*.pod",),
    "german": (
        f"{_HANDBOOK}/de-DE/*.html",
        "debian-reference-de/usr/share/debian-reference/*.de.html",
        "developers-reference-de/usr/share/developers-reference/de/*.html",
        f"debian-faq-de/{_DOC}/debian/FAQ/de/*.de.html",
        "manpages-de/usr/share/man/de/man*/*.gz",
        "manpages-de-dev/usr/share/man/de/man*/*.gz",
    ),
    "french": (
        f"{_HANDBOOK}/fr-FR/*.html",
        "debian-reference-fr/usr/share/debian-reference/*.fr.html",
        "developers-reference-fr/usr/share/developers-reference/fr/*.html",
        f"debian-faq-fr/{_DOC}/debian/FAQ/fr/*.fr.html",
        "manpages-fr/usr/share/man/fr/man*/*.gz",
        "manpages-fr-dev/usr/share/man/fr/man*/*.gz",
    ),
}
PACKAGES = tuple(sorted({glob.split("/")[0] for globs in SOURCES.values() for glob in globs} | {"mandoc"}))
# As stated in each package's copyright file; manual pages name their own licence where it differs.
LICENCES = {
    "coreutils": "GPL-3+",
    "debian-faq": "GPL-2+",
    "debian-faq-de": "GPL-2+",
    "debian-faq-fr": "GPL-2+",
    "debian-handbook": "GPL-2+ or CC-BY-SA-3.0",
    "debian-policy": "GPL-2+",
    "debian-reference-de": "GPL-2+",
    "debian-reference-en": "GPL-2+",
    "debian-reference-fr": "GPL-2+",
    "developers-reference": "GPL-2+",
    "developers-reference-de": "GPL-2+",
    "developers-reference-fr": "GPL-2+",
    "git-doc": "GPL-2",
    "libpython3.11-minimal": "PSF-2.0",
    "libpython3.11-stdlib": "PSF-2.0",
    "manpages": "GPL-2+, BSD, Expat, Linux-man-pages-copyleft (per page)",
    "manpages-de": "GPL-3+ (translations) and the originals' licences",
    "manpages-de-dev": "GPL-3+ (translations) and the originals' licences",
    "manpages-dev": "GPL-2+, BSD, Expat, Linux-man-pages-copyleft (per page)",
    "manpages-fr": "GPL-3+ (translations) and the originals' licences",
    "manpages-fr-dev": "GPL-3+ (translations) and the originals' licences",
    "perl-doc": "Artistic or GPL-1+",
    "postgresql-doc-15": "PostgreSQL",
    "python3.11-doc": "PSF-2.0",
    "sqlite3-doc": "public domain",
}
# Tables, indexes, other languages, and files that a held-out twin could be guessed from.
UNWANTED = re.compile(
    r"/(?:test|tests|idle_test|encodings|pydoc_data|lib2to3/pgen2|_sysconfigdata[^/]*|site-packages)(?:/|\.py|$)"
    r"|delta\.pod$|/perl(?:toc|cn|jp|ko|tw|uniprops|ebcdic|modlib)\.pod$"
    r"|/(?:index|search|genindex|bookindex|biblio|legalnotice|doc_\w+|keyword_index|changes|chronology|doclist|toc)"
    r"[^/]*\.html$|/(?:re)?_constants\.py$|/(?:capi3|oldnews|news|cves|vdbe|changelog)\.html$|/release-[\d-]+\.html$"
    r"|/(?:iso_8859-\d+|koi8-\w|cp125\d|armscii-8|sane-\w+)\.\d\.gz$"
)
