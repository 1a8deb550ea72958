"""`--model org/name`, in separate processes: downloads, models in the cache, interrupted downloads."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from engines import LAUNCH
from hub_home import GENERATE, IMPATIENT, NAME, RESOLVE, SHARDS, WANTED, Home
from hub_server import BRANCH, COMMIT, HubServer, Repository


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
    assert f"launch.py: {NAME}: the download stopped: " in log.splitlines()[-1]
    assert "Traceback" not in log
    assert home.unfinished() == []


def test_incomplete_model_without_network_is_one_line(home, hub, files, tmp_path) -> None:
    hub.repositories[NAME] = Repository(files)
    hub.stuck = SHARDS[1]
    process = home.start("-c", RESOLVE, NAME)
    assert hub.half.wait(60)
    process.kill()
    process.communicate(timeout=100)
    line = Home(tmp_path, "http://127.0.0.1:9").complaint(code=1)
    assert "cannot be reached" in line
    assert SHARDS[1] in line


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


def test_engine_runs_a_model_of_the_hub(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    arguments = ("--model", NAME, "--prompt-tokens", "5,6,7", "--max-tokens", "3", "--ignore-eos", "--json")
    process = home.start(LAUNCH, "generate", *arguments)
    out, log = process.communicate(timeout=100)
    assert process.returncode == 0, log
    assert f"[tandem] {NAME}: downloading 7 files" in log
    assert len(json.loads(out)["token_ids"]) == 3


def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    """The Hub's real address, on machines without a network; skipped on others."""
    try:
        socket.getaddrinfo("huggingface.co", 443)
    except OSError:
        for command in (GENERATE, ("doctor",)):
            line = Home(tmp_path, None).complaint("mistralai/Mixtral-8x7B-v0.1", code=1, command=command)
            assert "huggingface.co cannot be reached" in line
            assert "--model" in line
            assert "hf download mistralai/Mixtral-8x7B-v0.1" in line
    else:
        pytest.skip("this machine has a network")


def test_offline_mode_is_one_line(home: Home, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = Repository(files)
    home.env["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE" in home.complaint(code=1)
    assert hub.asked == []
    del home.env["HF_HUB_OFFLINE"]
    folder, _ = home.resolve()
    home.env["HF_HUB_OFFLINE"] = "1"
    assert home.resolve()[0] == folder
