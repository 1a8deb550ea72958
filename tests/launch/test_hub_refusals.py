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

from launch.hub import is_hub_name


def test_refused_models_get_one_line_and_no_weights(home, hub, files) -> None:
    pickles = {name: files[name] for name in ("config.json", "tokenizer.json", "pytorch_model.bin")}
    llama = files["config.json"].replace(b'"mixtral"', b'"llama"')
    login = ["no such model", "private", "no folder", "hf auth login", "HF_TOKEN"]
    disk = ["100000000.00 GB", "GB free", "HF_HOME"]
    config = ["config.json"]
    indices = (b"{", b"[]", b'{"weight_map": {"a": "b.safetensors"}}', b'{"weight_map": {"a": ["b"]}}')
    # The repository, words of the line, its exit code, and the files that are sent where these are certain.
    cases: list[tuple[Repository, list[str], int, list[str] | None]] = [
        (Repository({}, refuse=(401, "RepoNotFound")), login, 2, []),
        (Repository({}, refuse=(404, "RepoNotFound")), ["no such model"], 2, []),
        (Repository({}, refuse=(401, "GatedRepo")), ["access", "hf auth login", "HF_TOKEN"], 2, []),
        (Repository({}, refuse=(403, "GatedRepo")), ["access", "HF_TOKEN"], 2, []),
        (Repository({}, refuse=(403, "")), ["access", "HF_TOKEN"], 2, []),
        (Repository({}, refuse=(500, "")), ["error 500", "later"], 1, []),
        # Gated models have lists of files.
        (Repository(files, refuse_files=(401, "GatedRepo")), ["hf auth login"], 2, None),
        (Repository(files, refuse_files=(403, "GatedRepo")), ["hf auth login"], 2, None),
        (Repository(files, refuse_files=(403, "")), ["hf auth login"], 2, None),
        (Repository(pickles), ["pytorch_model.bin", "safetensors"], 2, []),
        (Repository({"README.md": b""}), ["no weights"], 2, []),
        (Repository(files | {"\x1b]2;x\a.json": b"{}"}), ["control", "\ufffd]2;x\ufffd.json"], 2, []),
        (Repository(files | {"config.json": llama}), ["llama", "mixtral"], 2, config),
        *((Repository(files | {"config.json": c}), config, 2, config) for c in (b"{", b"[]", b"\xff")),
        *((Repository(files | {INDEX: index}), [INDEX], 2, None) for index in indices),
        # A full disk is reported before the download.
        (Repository(files, sizes={SHARDS[0]: 10**17}), disk, 1, None),
    ]
    names = [f"org/m{i}" for i in range(len(cases))]
    hub.repositories |= {name: repository for name, (repository, *_) in zip(names, cases, strict=True)}
    hub.repositories[NAME] = Repository(files)
    *found, missing, revision = home.complaints(*names, "org/missing", f"{NAME}@v9")
    for name, (_, words, code, sent), (exit_code, line) in zip(names, cases, found, strict=True):
        assert exit_code == code, line
        assert all(word in line for word in words), line
        assert sent in (None, hub.sent(name)), line
        assert not {*SHARDS} & {*hub.sent(name)}, line
    assert missing[0] == revision[0] == 2
    assert "no such model" in missing[1]
    assert "revision" in revision[1]


def test_local_folder_is_used_before_the_hub(home: Home, hub: HubServer, tmp_path, tiny_model: Path) -> None:
    hub.repositories[NAME] = Repository({})
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).symlink_to(tiny_model)
    process = home.start("-c", RESOLVE, NAME, cwd=tmp_path)
    out, log = process.communicate(timeout=60)
    assert out.strip() == NAME, log
    assert hub.asked == []


def test_mistyped_policy_is_reported_before_the_download(home, hub, files) -> None:
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
        "import sys, pathlib, launch.cli, launch.hub as hub; "
        "hub.model_folder(pathlib.Path(sys.argv[1]), True)"
    )
    script += "; sys.exit('huggingface_hub' in sys.modules)"
    command = [sys.executable, "-c", script, str(tiny_model)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0
