"""Python, the libraries that Tandem requires, and compilers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import re
import shutil
import tomllib
from dataclasses import dataclass

from launch.doctor.finding import Finding
from launch.processes.children import ROOT

TOPIC = "software"
COMPILERS = ("gcc", "clang", "cc")
COMPILER_LIMIT = 10.0  # seconds to say a version


@dataclass(frozen=True)
class Requirement:
    """A library and the versions that will do, such as ((">=", "2.11"), ("<", "2.14"))."""

    name: str
    bounds: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.name + ",".join(operator + version for operator, version in self.bounds)

    def allows(self, version: str) -> bool:
        """By the numbers of the release alone: 2.13.0+cpu is 2.13."""
        here = release(version)
        for operator, bound in self.bounds:
            there = release(bound)
            fits = {
                ">=": here >= there,
                ">": here > there,
                "<": here < there,
                "<=": here <= there,
                "==": here == there,
                "!=": here != there,
            }
            if not fits[operator]:
                return False
        return True


def parse_requirement(text: str) -> Requirement | None:
    """ "torch>=2.11,<2.14" as pyproject.toml writes it; None for what this grammar does not have."""
    match = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*((?:[<>=!]=?\s*[0-9][^,;\s]*\s*,?\s*)*)", text)
    if match is None:
        return None
    bounds = re.findall(r"(>=|<=|==|!=|<|>)\s*([0-9][^,;\s]*)", match[2])
    return Requirement(match[1], tuple(bounds))


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version up to its first other part, without zeros at the end: they mean nothing."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", version)
    numbers = [int(n) for n in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def requirements() -> tuple[str, list[str], list[str]]:
    """The Python versions, the libraries, and those for CUDA: from the checkout's pyproject.toml, otherwise
    from the installed package. Empty where there is neither."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        optional = project.get("optional-dependencies", {})
        return project.get("requires-python", ""), project.get("dependencies", []), optional.get("cuda", [])
    except (OSError, ValueError, KeyError):
        pass  # not a checkout: ask the installation
    try:
        data = importlib.metadata.metadata("tandem")
    except importlib.metadata.PackageNotFoundError:
        return "", [], []
    lines = data.get_all("Requires-Dist") or []
    plain = [line for line in lines if ";" not in line]
    cuda = [line.split(";")[0] for line in lines if re.search(r"extra\s*==\s*['\"]cuda", line)]
    return "".join(data.get_all("Requires-Python") or []), plain, cuda


def installed(name: str) -> str | None:
    """A library's version; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(texts: list[str], optional: bool = False) -> list[Finding]:
    """A finding for each library that is missing or of another version, and one for all the others."""
    found, fine = [], []
    for text in texts:
        wanted = parse_requirement(text)
        if wanted is None:
            found.append(Finding(TOPIC, "note", f"requirement {text!r}", "not understood, so not checked"))
            continue
        version = installed(wanted.name)
        if version is not None and wanted.allows(version):
            fine.append(f"{wanted.name} {version}")
            continue
        what = "is not installed" if version is None else f"{version} is not {wanted}"
        means = "engines cannot use the GPU without it" if optional else "engines need it, in these versions"
        do = f'python -m pip install "{wanted}"'
        prevents = not optional
        found.append(Finding(TOPIC, "problem", f"{wanted.name} {what}", means, do, prevents))
    if fine:
        found.append(Finding(TOPIC, "ok", ", ".join(fine), "the versions that are required"))
    return found


async def inspect(gpu: bool) -> list[Finding]:
    """`gpu`: there is a GPU, for which optional libraries are needed."""
    python, needed, cuda = requirements()
    here = platform.python_version()
    wanted = parse_requirement(f"python{python}")
    if python and wanted is not None and not wanted.allows(here):
        do = "make a new virtual environment with a newer Python"
        what = f"Python {here} is not {python}"
        version = Finding(TOPIC, "problem", what, "this version is required", do, prevents=True)
    else:
        version = Finding(TOPIC, "ok", f"Python {here}", f"required: {python}" if python else "")
    found = [version, *judge(needed), *(judge(cuda, optional=True) if gpu else [])]
    if not needed:
        what = "neither pyproject.toml nor an installed package"
        found.append(Finding(TOPIC, "note", what, "versions cannot be checked"))
    return [*found, await _compilers()]


def compilers() -> list[str]:
    """Paths of the compilers that are found, each once: cc is often one of the others."""
    paths = [os.path.realpath(path) for path in map(shutil.which, COMPILERS) if path]
    return list(dict.fromkeys(paths))


async def _compilers() -> Finding:
    lines = await asyncio.gather(*(_version(path) for path in compilers()))
    words = "; ".join(lines) or "none"
    means = "one is used when Tandem is installed, for the kernels, and not after that"
    return Finding(TOPIC, "ok", f"compilers: {words}", means)


async def _version(compiler: str) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *(compiler, "--version"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as e:
        return str(e.strerror)
    try:
        async with asyncio.timeout(COMPILER_LIMIT):
            out, _ = await process.communicate()
    except TimeoutError:
        return "no answer"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode("utf-8", "replace").partition("\n")[0].strip() or "no answer"
