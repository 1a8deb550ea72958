"""The versions of Python and of the required libraries, and whether there is a compiler."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from launch.doctor.finding import Finding, Topic
from workers.lifetime import ROOT

TOPIC = Topic("software")
# What a missing library of the extra `cuda` means.
WITHOUT = "engines cannot use the GPU without it"
COMPILERS = ("gcc", "clang", "cc")


def allows(specifier: SpecifierSet, version: str) -> bool:
    """Tells whether a release fits; a local build or a pre-release (2.13.0+cpu) counts as its release."""
    try:
        return specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def requirements() -> tuple[str, list[str], list[str]]:
    """Python versions, libraries, libraries for CUDA: of the checkout, else of the package; empty without."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return _installed_requirements()
    optional = project.get("optional-dependencies", {})
    return project.get("requires-python", ""), project.get("dependencies", []), optional.get("cuda", [])


def _installed_requirements() -> tuple[str, list[str], list[str]]:
    try:
        data = importlib.metadata.metadata("tandem")
    except importlib.metadata.PackageNotFoundError:
        return "", [], []
    every = [Requirement(line) for line in data.get_all("Requires-Dist") or []]
    optional = [r for r in every if r.marker is not None and not r.marker.evaluate({"extra": ""})]
    plain = [f"{r.name}{r.specifier}" for r in every if r not in optional]
    cuda = [f"{r.name}{r.specifier}" for r in optional if r.marker and r.marker.evaluate({"extra": "cuda"})]
    return "".join(data.get_all("Requires-Python") or []), plain, cuda


def pip_install(arguments: str) -> str:
    """A command that installs into the running environment, or makes a new one where the distribution forbids
    that (PEP 668)."""
    marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and marker.exists():
        return f"cd {shlex.quote(str(ROOT))} && make -B run  (installs into .venv, which launch.py then uses)"
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def installed(name: str) -> str | None:
    """A library's version; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(texts: list[str], optional: bool = False) -> list[Finding]:
    """A finding for each library that is missing or of a wrong version, and one for all the others."""
    found, fitting = [], []
    for text in texts:
        try:
            required = Requirement(text)
        except InvalidRequirement:
            found.append(TOPIC.note(f"requirement {text!r}", "invalid, so not checked"))
            continue
        version = installed(required.name)
        if version is not None and allows(required.specifier, version):
            fitting.append(f"{required.name} {version}")
            continue
        what = "is not installed" if version is None else f"{version} is not {required.specifier}"
        means = WITHOUT if optional else "engines need it, in these versions"
        do = pip_install(f'"{required}"')
        found.append(TOPIC.problem(f"{required.name} {what}", means, do, prevents=not optional))
    if fitting:
        found.append(TOPIC.ok(", ".join(fitting), "the required versions"))
    return found


def inspect(gpu: bool) -> list[Finding]:
    """`gpu`: whether the machine has a GPU, for which optional libraries are needed."""
    python, needed, cuda = requirements()
    here = platform.python_version()
    if not allows(SpecifierSet(python), here):
        what, means = f"Python {here} is not {python}", "this version is required"
        do = "create a new virtual environment with a newer Python"
        version = TOPIC.problem(what, means, do, prevents=True)
    else:
        version = TOPIC.ok(f"Python {here}", f"required: {python}" if python else "")
    found = [version, *judge(needed), *(judge(cuda, optional=True) if gpu else [])]
    if not needed:
        what = "neither pyproject.toml nor an installed package of Tandem"
        found.append(TOPIC.note(what, "versions cannot be checked"))
    compilers = ", ".join(name for name in COMPILERS if shutil.which(name)) or "none"
    means = "used for the kernels when Tandem is installed, and not afterwards"
    return [*found, TOPIC.ok(f"compilers: {compilers}", means)]
