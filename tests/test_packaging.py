"""What `packaging/` runs exists: programs, options by the real parser, files, extras, number of libraries."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from c_libraries import c_libraries
from packaging.specifiers import SpecifierSet

from launch.command_line.options import Options, parse
from pipeline.gateway.access import is_loopback

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "shm", "workers", "pipeline", "launch")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SERVICE = ROOT / "packaging/tandem.service"
DOCKERFILE = ROOT / "packaging/Dockerfile"
EXTRA = re.compile(r"'[./\w]*\[([\w,]+)\]'")


def extras(text: str) -> list[str]:
    """Names in 'FOLDER[a,b]'."""
    return [name for names in EXTRA.findall(text) for name in names.split(",")]


def understood(words: list[str]) -> Options:
    """What a command of an installation means, which is no more open than the command line allows."""
    program, *arguments = words
    assert Path(program).name in PROJECT["project"]["scripts"]
    options = parse(arguments)
    config = options.config()
    assert config.http is None or config.http_keys or is_loopback(config.http.rpartition(":")[0])
    return options


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def of(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def test_service_starts_an_engine_with_default_and_shown_options() -> None:
    text = SERVICE.read_text("utf-8")
    command = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    settings = re.findall(r"^(?:#   |Environment=)TANDEM_OPTIONS=(.*)$", text, re.MULTILINE)
    assert (len(command), len(settings)) == (1, 2)
    for setting in settings:
        options = understood(shlex.split(command[0].replace("$TANDEM_OPTIONS", setting)))
        assert options.command == "serve"
        assert options.config().http
    shown = re.search(r"-- env \S+ (/opt/tandem\S+ .*)$", text, re.MULTILINE)
    assert shown
    assert understood(shlex.split(shown[1])).command == "chat"


def test_service_is_understood_by_systemd(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / SERVICE.name
    text = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", SERVICE.read_text("utf-8"), flags=re.MULTILINE)
    unit.write_text(text.replace("User=tandem", "User=root"), "utf-8")
    done = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_image_has_what_the_project_needs() -> None:
    bases = [base.split()[0] for base in of("FROM")]
    assert len(set(bases)) == 1  # what is compiled in the first runs in the second
    release = re.fullmatch(r"python:(3\.\d+)-slim-bookworm", bases[0])
    assert release
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(release[1])
    copied = {name for words in of("COPY") for name in words.split()[:-1]}
    assert copied == {
        "pyproject.toml",
        "setup.py",
        "README.md",
        "protocol",
        "shm",
        "workers",
        "pipeline",
        "launch",
    }
    admitted = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text("utf-8")
    assert {line[1:] for line in admitted.splitlines() if line.startswith("!")} == copied
    assert f"grep --count '\\.so ')\" = {len(c_libraries())}" in of("RUN")[1]


def test_image_runs_commands_that_exist() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    assert understood([*json.loads(entry), *json.loads(command)]).command == "serve"
    assert of("USER") == ["tandem"]
    shown = re.findall(r"(?:--volume \S+|`) ?(tandem )?(serve --http [^`\n]*)", DOCKERFILE.read_text("utf-8"))
    assert len(shown) == 2
    for _, arguments in shown:
        understood(shlex.split(f"tandem {arguments}"))


def test_shown_extras_exist() -> None:
    named = extras(SERVICE.read_text("utf-8"))
    for words in of("ARG"):
        name, _, value = words.partition("=")
        named += value.split(",") if name == "EXTRAS" else []
    named += re.findall(r"--build-arg EXTRAS=([\w,]+)", DOCKERFILE.read_text("utf-8"))[0].split(",")
    assert {"serve", "cuda"} <= set(named) <= set(PROJECT["project"]["optional-dependencies"])
