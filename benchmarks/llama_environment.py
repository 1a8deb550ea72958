"""Builds the virtual environment of llama.cpp, for this machine's CPU, where it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

from rich.console import Console

PACKAGES = ("gguf", "numpy")
LLAMA = "llama-cpp-python"
CMAKE = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON"  # for this CPU; OpenMP threads, llama.cpp's default
VERSIONS = (
    "import json, importlib.metadata as m, llama_cpp, gguf;"
    f"print(json.dumps({{p: m.version(p) for p in ('{LLAMA}', 'gguf')}}))"
)
CHECK_LIMIT = 120.0  # seconds


def ready(folder: Path, console: Console) -> tuple[Path, dict[str, str]]:
    """The environment's interpreter and package versions; an existing one is used unchanged. Raises
    SystemExit where it cannot be built."""
    python = folder / "bin" / "python"
    if (versions := _versions(python)) is not None:
        return python, versions
    console.print(f"building llama.cpp for this CPU in {folder}: once, about 20 minutes on two cores")
    venv.create(folder, with_pip=True, clear=False)
    _install(python, *PACKAGES)
    _install(python, "--no-binary", LLAMA, "-C", f"cmake.args={';'.join(CMAKE.split())}", LLAMA)
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
