"""GGUF models: `--model org/name:TYPE` downloads one of a repository's, and nothing else, and what names none
is refused in a line that says which there are; files of this machine; a whole engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from engines import run
from gguf_files import Type, plain, write_gguf
from gguf_tokenizers import add_tokenizer
from hub_home import NAME, RESOLVE, Home
from hub_server import COMMIT, HubServer, Repository

from launch.errors import WrongUsage
from launch.hub import choose, gguf_models, is_hub_name, model_folder
from pipeline.errors import ModelError
from pipeline.models.shapes import is_gguf, short_name

Q8, PARTS = "tiny-Q8_0.gguf", ("F16/tiny-F16-00001-of-00002.gguf", "F16/tiny-F16-00002-of-00002.gguf")


def write_tiny(tiny_model: Path, path: Path, kind: Type, tensors: int = 0) -> Path:
    """The tiny model with its tokenizer."""
    text = partial(add_tokenizer, folder=tiny_model, kind="gpt2", pre="gpt-2")
    return write_gguf(tiny_model, path, plain(kind), tensors, text)


@pytest.fixture(scope="module")
def ggufs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Repositories have more than models."""
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny(tiny_model, folder / Q8, Type.Q8_0)
    write_tiny(tiny_model, folder / "tiny-F16.gguf", Type.F16, 12)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    content = {name: files[Path(name).name] for name in (Q8, *PARTS)}
    others = ("mmproj-F16.gguf", "imatrix.gguf", "README.md", "tokenizer.json", "config.json")
    return content | dict.fromkeys(others, b"x" * 99)


def test_one_type_is_downloaded_and_then_found_without_a_network(
    home: Home, hub: HubServer, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository(ggufs, gguf={"architecture": "llama"})
    place = home.cache / "models--org--tiny-model" / "snapshots" / COMMIT
    path, log = home.resolve(f"{NAME}:f16")
    assert path == place / PARTS[0]
    assert hub.sent() == [Path(name).name for name in PARTS]
    assert "downloading 2 files" in log
    assert "(2 of 2), " in log
    assert all((place / name).read_bytes() == ggufs[name] for name in PARTS)
    hub.asked.clear()
    for name in (f"{NAME}:F16", NAME):
        assert home.resolve(name)[0] == path
    assert hub.asked == []
    assert home.resolve(f"{NAME}@main:Q8_0")[0] == place / Q8
    assert hub.sent() == [Q8]
    away = Home(tmp_path, "http://127.0.0.1:9")
    # Two are there now: without a type it is for the Hub to say that this is not clear.
    assert "cannot be reached" in away.complaint(code=1)
    assert short_name(path) == Path(PARTS[0]).name


def test_doctor_downloads_no_gguf_file(home: Home, hub: HubServer, ggufs, files) -> None:
    config = {"config.json": files["config.json"]}
    hub.repositories |= {NAME: Repository(ggufs | config), "org/b": Repository({Q8: ggufs[Q8]})}
    script = RESOLVE.replace("download=True", "download=False")
    for _ in range(2):
        process = home.start("-c", script, f"{NAME}:Q8_0")
        out, log = process.communicate(timeout=60)
        assert list(Path(out.strip()).iterdir()) == [Path(out.strip()) / "config.json"], log
    assert hub.sent() == ["config.json"]
    line = home.complaint("org/b", command=("doctor",))
    assert "this command does not download it" in line


def test_what_names_no_model_is_refused_and_nothing_sent(home: Home, hub: HubServer, ggufs) -> None:
    other = {"architecture": "mamba"}
    # The repository, what is behind its name, and words of the line.
    cases: list[tuple[Repository, str, list[str]]] = [
        (Repository(ggufs), "", ["has 2 GGUF models: F16, Q8_0", "org/m0:F16"]),
        (Repository(ggufs), ":Q4_K_M", ["no GGUF model of this type, but F16, Q8_0"]),
        (
            Repository(ggufs | {f"{Q8[:-5]}.imat.gguf": b""}),
            ":Q8_0",
            ["2 of its GGUF models", "tiny-Q8_0.imat"],
        ),
        (Repository({PARTS[1]: b""}), "", ["1 of 2 files are on the Hub"]),
        (Repository({"README.md": b""}), ":Q8_0", ["no GGUF files", ":Q8_0"]),
        (
            Repository(ggufs, gguf=other),
            ":Q8_0",
            ["architecture mamba", "not supported", "llama", "nothing was"],
        ),
        (Repository({"mmproj-F16.gguf": b""}), "", ["nor a GGUF file"]),
        (Repository(ggufs, sizes={Q8: 10**17}), ":Q8_0", ["100000000.00 GB", "HF_HOME"]),
    ]
    names = [f"org/m{i}{kind}" for i, (_, kind, _) in enumerate(cases)]
    hub.repositories |= {f"org/m{i}": repository for i, (repository, *_) in enumerate(cases)}
    for (_, _, words), (code, line) in zip(cases, home.complaints(*names), strict=True):
        assert code == (1 if "HF_HOME" in words else 2), line
        assert all(word in line for word in words), line
    assert hub.sent() == []


def test_types_are_told_by_the_names_of_files() -> None:
    unsloth = [f"Qwen3-30B-A3B-{kind}.gguf" for kind in ("Q4_K_M", "UD-Q4_K_XL", "IQ4_XS", "Q4_K_S", "BF16")]
    shards = [f"Q8_0/Qwen3-30B-A3B-Q8_0-0000{part}-of-00003.gguf" for part in (3, 1, 2)]
    models = gguf_models([*unsloth, *shards, "mmproj-BF16.gguf", "imatrix_unsloth.gguf", "a.safetensors"])
    assert len(models) == 6
    assert choose("o/n", models, "Q8_0") == sorted(shards)
    for kind, file in (("q4_k_m", 0), ("Q4_K_XL", 1), ("UD-Q4_K_XL", 1), ("iq4_xs", 2), ("bf16", 4)):
        assert choose("o/n", models, kind) == [unsloth[file]]
    for kind in ("Q4_K", "Q4", "K_M.", "8_0"):
        with pytest.raises(
            WrongUsage, match="BF16, IQ4_XS, Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_XL; write one as o/n:BF16"
        ):
            choose(f"o/n:{kind}", models, kind)
    dotted = gguf_models(["M.Q4_K_M.gguf", "M.i1-Q4_K_M.gguf"])
    assert choose("o/n", dotted, "M.Q4_K_M") == ["M.Q4_K_M.gguf"]
    with pytest.raises(WrongUsage, match=r"M\.Q4_K_M, M\.i1-Q4_K_M"):
        choose("o/n", dotted, "Q4_K_M")


def test_folder_with_one_gguf_model_is_that_file(tmp_path: Path) -> None:
    assert model_folder(tmp_path, download=True) == tmp_path
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).touch()
    assert model_folder(tmp_path, download=True) == tmp_path / "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match="2 GGUF models"):
        model_folder(tmp_path, download=True)
    (tmp_path / "model.safetensors").touch()
    assert model_folder(tmp_path, download=True) == tmp_path


def test_names_with_a_type() -> None:
    assert all(map(is_hub_name, ("o/n:Q4_K_M", "o/n-GGUF:UD-Q4_K_XL", "o/n@main:M.i1-Q4_K_M")))
    assert not any(map(is_hub_name, ("o/n.gguf", "o/n:", "o/n:a/b", "o/n:a:b", "o/n:.", "o/n:a@b")))
    assert is_gguf("a/B.GGUF")
    assert not is_gguf("shape:a.gguf")


def test_a_file_answers_as_the_folder_that_it_was_made_from(tiny_model: Path, tmp_path: Path) -> None:
    """A whole engine: conversation, template, tokens, texts, and scores."""
    path = write_tiny(tiny_model, tmp_path / "tiny-F32.gguf", Type.F32)
    models = ("--model", str(tiny_model), "--format", "bf16"), ("--model", str(path))
    ask = ("generate", "--chat", "--prompt", "What is a generator?", "--max-tokens", "12", "--ignore-eos")
    (code, wanted, log), (_, found, _) = (run(*ask, *model, "--log-level", "warning") for model in models)
    assert code == 0, log
    assert found == wanted
    assert len(found.split("\n")) > 1


def test_damaged_files_are_one_line(tmp_path: Path, complaint: Callable[..., str]) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    for command in (
        ("generate", "--prompt", "a"),
        ("generate", "--prompt-tokens", "1"),
        ("doctor",),
        ("advise",),
    ):
        assert str(path) in complaint(*command, "--model", str(path))
    assert "does not exist" in complaint("generate", "--prompt", "a", "--model", str(tmp_path / "b.gguf"))
