"""Builds the virtual environments of llama.cpp, for this machine's CPU, where they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

PACKAGES = ("gguf", "numpy")
LLAMA = "llama-cpp-python"
VERSIONS = (
    "import json, importlib.metadata as m, llama_cpp, gguf;"
    f"print(json.dumps({{p: m.version(p) for p in ('{LLAMA}', 'gguf')}}))"
)
CHECK_LIMIT = 120.0  # seconds


@dataclass(frozen=True)
class Build:
    name: str
    suffix: str  # of its environment's folder
    cmake: tuple[str, ...]


# All instructions of this CPU; OpenMP threads, llama.cpp's default; nothing for images.
NATIVE = Build("for this CPU", "", ("-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", "-DLLAVA_BUILD=OFF"))
# llama.cpp's code for AMX is compiled where the compiler defines this macro, and only there. Its own switches
# (GGML_AMX_INT8) have no effect beside GGML_NATIVE, which alone finds this CPU's other instructions.
UNDEFINED = tuple(f"-DCMAKE_{language}_FLAGS=-U__AMX_INT8__" for language in ("C", "CXX"))
WITHOUT_AMX = Build("for this CPU, without AMX", "-without-amx", NATIVE.cmake + UNDEFINED)


def ready(folder: Path, build: Build, console: Console) -> tuple[Path, dict[str, str]]:
    """The interpreter of a build's environment and its package versions; an existing one is used unchanged.
    Raises SystemExit where it cannot be built."""
    folder = folder.with_name(folder.name + build.suffix)
    python = folder / "bin" / "python"
    if (versions := _versions(python)) is not None:
        return python, versions
    console.print(f"building llama.cpp {build.name} in {folder}: once, minutes of compiling")
    venv.create(folder, with_pip=True, clear=False)
    _install(python, *PACKAGES)
    # pip would otherwise install another build's wheel from its cache.
    cmake = f"cmake.args={';'.join(build.cmake)}"
    _install(python, "--no-cache-dir", "--no-binary", LLAMA, "-C", cmake, LLAMA)
    if (versions := _versions(python)) is None:
        raise SystemExit(f"llama.cpp in {folder} does not start; remove the folder and try again")
    return python, versions


def _versions(python: Path) -> dict[str, str] | None:
    """None where the environment is missing or incomplete."""
    if not python.exists():
        return None
    command = [python, "-P", "-c", VERSIONS]
    found = subprocess.run(command, capture_output=True, timeout=CHECK_LIMIT)
    return json.loads(found.stdout) if found.returncode == 0 else None


def _install(python: Path, *arguments: str) -> None:
    """Raises SystemExit below pip's own messages, which go to stderr."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit(f"pip could not install {arguments[-1]}; its messages are above")
