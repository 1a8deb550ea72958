"""`--model org/name`, in separate processes: downloads, models in the cache, and interrupted
downloads; refused models get one line each, and no weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engines import LAUNCH
from hub_home import IMPATIENT, INDEX, NAME, RESOLVE, SHARDS, WANTED, Home
from hub_server import BRANCH, COMMIT, HubServer, Repository

from launch.hub import is_hub_name


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_downloads_what_is_needed_and_no_more(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    folder, log = home.resolve()
    assert folder == home.cache / "models--org--tiny-model" / "snapshots" / COMMIT
    assert names_in(folder) == WANTED
    assert all((folder / name).read_bytes() == files[name] for name in WANTED)
    assert hub.sent()[0] == "config.json"  # which decides on the other files
    assert hub.sent()[-2:] == list(SHARDS)
    assert "downloading 8 files" not in log  # two were downloaded before
    assert "downloading 7 files" in log
    assert "GB free" in log
    assert f"{SHARDS[1]} (7 of 7), " in log  # without a terminal there is no bar


def test_doctor_downloads_the_config_alone(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    """Then it asks the Hub for nothing more, and plans with the whole model once that is there."""
    hub.repositories[NAME] = Repository(files)
    script = RESOLVE.replace("download=True", "download=False")
    process = home.start("-c", script, NAME)
    config_folder = Path(process.communicate(timeout=60)[0].strip())
    assert hub.sent() == ["config.json"]
    assert os.listdir(config_folder) == ["config.json"]
    hub.asked.clear()
    process = home.start("-c", script, NAME)
    assert process.communicate(timeout=60)[0].strip() == str(config_folder)
    assert hub.asked == []
    folder, _ = home.resolve()
    process = home.start("-c", script, NAME)
    assert process.communicate(timeout=60)[0].strip() == str(folder)


def test_second_start_sends_no_request(home: Home, hub: HubServer, files: dict[str, bytes], tmp_path) -> None:
    """It uses the files of the cache, even if the Hub has newer ones."""
    hub.repositories[NAME] = Repository(files)
    folder, _ = home.resolve()
    hub.repositories[NAME].commits["main"] = BRANCH
    hub.asked.clear()
    again, log = home.resolve()
    assert again == folder
    assert hub.asked == []
    assert str(folder) in log
    assert Home(tmp_path, "http://127.0.0.1:9").resolve()[0] == folder
    asked_for, _ = home.resolve(f"{NAME}@other")
    assert asked_for.name == BRANCH
    assert hub.sent() == ["config.json"] or not {*SHARDS} & {*hub.sent()}  # the same bytes are not sent again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_download_resumes_after_complete_files(home, hub, files, number) -> None:
    """The next start continues after the complete files."""
    hub.repositories[NAME] = Repository(files)
    hub.stuck = SHARDS[1]
    process = home.start(LAUNCH, "generate", "--prompt", "a", "--model", NAME, "--log-level", "warning")
    assert hub.half.wait(60)
    process.send_signal(number)
    out, log = process.communicate(timeout=100)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert (process.returncode, out) == (1, "")
        assert log.endswith("launch.py: interrupted\n")
        assert "Traceback" not in log
        assert home.unfinished() == []
    hub.go.set()
    hub.stuck = ""
    hub.asked.clear()
    folder, _ = home.resolve()
    assert hub.sent() == [SHARDS[1]]
    assert all((folder / name).read_bytes() == files[name] for name in WANTED)


def test_lost_network_is_one_line(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    hub.stuck = SHARDS[1]
    words = ("generate", "--prompt", "a", "--model", NAME, "--log-level", "warning")
    process = home.start("-c", IMPATIENT, *words)
    assert hub.half.wait(60)
    hub.lost = True
    hub.go.set()
    out, log = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert f"launch.py: {NAME}: " in log.splitlines()[-1]
    assert "Traceback" not in log
    assert home.unfinished() == []


def test_missing_tokenizer_is_downloaded(home, hub, files, tmp_path) -> None:
    """Another program has downloaded the weights alone."""
    hub.repositories[NAME] = Repository(files)
    folder, _ = home.resolve()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    alone, log = Home(tmp_path, "http://127.0.0.1:9").resolve()
    assert alone == folder
    assert "no tokenizer" in log
    hub.asked.clear()
    assert home.resolve()[0] == folder
    assert not {*SHARDS} & {*hub.sent()}
    assert names_in(folder) == WANTED


def test_offline_mode_is_one_line(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    home.env["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE" in home.complaint(code=1)
    assert hub.asked == []
    del home.env["HF_HUB_OFFLINE"]
    folder, _ = home.resolve()
    home.env["HF_HUB_OFFLINE"] = "1"
    assert home.resolve()[0] == folder


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
        (Repository(pickles), ["safetensors"], 2, []),
        (Repository({"README.md": b""}), ["safetensors"], 2, []),
        (Repository(files | {"\x1b]2;x\a.json": b"{}"}), ["control", "\ufffd]2;x\ufffd.json"], 2, []),
        (Repository(files | {"config.json": llama}), ["llama", "no routed experts"], 2, config),
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


def test_hub_names_are_distinguished_from_paths() -> None:
    assert all(map(is_hub_name, ("org/name", "mistralai/Mixtral-8x7B-v0.1", "org/name@v1.0")))
    paths = ("name", "/org/name", "../name", "org/a..b", "org/a--b", "org/name@../x", "org/n\u00e4me")
    other = ("shape:mixtral-8x7b/2", "org/name\n", "org/name.git", f"org/{'x' * 97}")
    assert not any(map(is_hub_name, (*paths, *other)))
