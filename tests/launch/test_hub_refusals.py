"""`--model org/name` for models that are missing, gated or unsupported: one line each, and no weights are
downloaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import LAUNCH, ROOT
from hub_home import INDEX, NAME, RESOLVE, SHARDS, Home
from hub_server import COMMIT, HubServer, Repository

from launch.hub.hf_download import is_hub_name


@pytest.mark.parametrize(
    ("refuse", "words", "code"),
    [
        ((401, "RepoNotFound"), ["no such model", "private", "no folder", "hf auth login", "HF_TOKEN"], 2),
        ((404, "RepoNotFound"), ["no such model"], 2),
        ((401, "GatedRepo"), ["access", "hf auth login", "HF_TOKEN"], 2),
        ((403, "GatedRepo"), ["access", "HF_TOKEN"], 2),
        ((403, ""), ["access", "HF_TOKEN"], 2),
        ((500, ""), ["error 500", "later"], 1),
    ],
)
def test_refused(home: Home, hub: HubServer, refuse: tuple[int, str], words: list[str], code: int) -> None:
    hub.repositories[NAME] = Repository({}, refuse=refuse)
    line = home.complaint(code=code)
    for word in words:
        assert word in line


def test_unknown_name_is_one_line(home: Home, hub: HubServer) -> None:
    assert "no such model" in home.complaint("org/missing")


@pytest.mark.parametrize("refuse", [(401, "GatedRepo"), (403, "GatedRepo"), (403, "")])
def test_gated_models_have_lists_of_files(
    home: Home, hub: HubServer, files: dict[str, bytes], refuse: tuple[int, str]
) -> None:
    hub.repositories[NAME] = Repository(files, refuse_files=refuse)
    assert "hf auth login" in home.complaint()


def test_missing_revision_is_refused(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    assert "revision" in home.complaint(f"{NAME}@v9")


def test_repository_without_safetensors_is_refused(
    home: Home, hub: HubServer, files: dict[str, bytes]
) -> None:
    pickles = {name: files[name] for name in ("config.json", "tokenizer.json", "pytorch_model.bin")}
    hub.repositories[NAME] = Repository(pickles)
    line = home.complaint()
    assert "pytorch_model.bin" in line
    assert "safetensors" in line
    hub.repositories[NAME] = Repository({"README.md": b""})
    assert "no weights" in home.complaint()
    assert hub.sent() == []


def test_unsupported_architecture_is_refused(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    files["config.json"] = files["config.json"].replace(b'"mixtral"', b'"llama"')
    hub.repositories[NAME] = Repository(files)
    line = home.complaint()
    assert "llama" in line
    assert "mixtral" in line
    assert hub.sent() == ["config.json"]


@pytest.mark.parametrize("config", [b"{", b"[]", b"\xff"])
def test_config_that_is_not_json_is_refused(
    home: Home, hub: HubServer, files: dict[str, bytes], config: bytes
) -> None:
    hub.repositories[NAME] = Repository(files | {"config.json": config})
    assert "config.json" in home.complaint()
    assert hub.sent() == ["config.json"]


@pytest.mark.parametrize(
    "index", [b"{", b"[]", b'{"weight_map": {"a": "b.safetensors"}}', b'{"weight_map": {"a": ["b"]}}']
)
def test_damaged_index_is_refused(home: Home, hub: HubServer, files: dict[str, bytes], index: bytes) -> None:
    hub.repositories[NAME] = Repository(files | {INDEX: index})
    assert INDEX in home.complaint()
    assert not {*SHARDS} & {*hub.sent()}


def test_full_disk_is_reported_before_the_download(
    home: Home, hub: HubServer, files: dict[str, bytes]
) -> None:
    hub.repositories[NAME] = Repository(files, sizes={SHARDS[0]: 10**17})
    line = home.complaint(code=1)
    assert "100000000.00 GB" in line
    assert "GB free" in line
    assert "HF_HOME" in line
    assert not {*SHARDS} & {*hub.sent()}


def test_local_folder_is_used_before_the_hub(
    home: Home, hub: HubServer, tmp_path: Path, tiny_model: Path
) -> None:
    hub.repositories[NAME] = Repository({})
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).symlink_to(tiny_model)
    process = subprocess.run(
        [sys.executable, "-c", RESOLVE, NAME], cwd=tmp_path, env=home.env, capture_output=True, timeout=60
    )
    assert process.stdout.decode().strip() == NAME
    assert hub.asked == []


def test_mistyped_policy_is_reported_before_the_download(
    home: Home, hub: HubServer, files: dict[str, bytes]
) -> None:
    hub.repositories[NAME] = Repository(files)
    process = home.start(LAUNCH, "generate", "--prompt", "a", "--model", NAME, "--policy", "fidler")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "fiddler" in log
    assert hub.asked == []


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("org/name", True),
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("org/name@v1.0", True),
        (f"org/name@{COMMIT}", True),
        ("name", False),
        ("/org/name", False),
        ("./org/name", False),
        ("org/name/", False),
        ("a/b/c", False),
        ("../name", False),
        ("org/..", False),
        ("org/a..b", False),
        ("org/a--b", False),
        ("org/.name", False),
        ("org/name@", False),
        ("org/name@../x", False),
        ("org/n\u00e4me", False),
        ("org/na me", False),
        ("shape:mixtral-8x7b/2", False),
        ("org/name\n", False),
        ("org/name.git", False),
        (f"org/{'x' * 97}", False),
    ],
)
def test_hub_names_are_distinguished_from_paths(text: str, is_name: bool) -> None:
    assert is_hub_name(text) == is_name


def test_huggingface_hub_is_imported_only_for_such_names(tiny_model: Path) -> None:
    script = (
        "import sys, pathlib, launch.cli, launch.hub.hf_download as hub; "
        "hub.model_folder(pathlib.Path(sys.argv[1]), True)"
    )
    script += "; sys.exit('huggingface_hub' in sys.modules)"
    command = [sys.executable, "-c", script, str(tiny_model)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0
