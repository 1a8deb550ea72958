"""A home with a cache of the Hugging Face Hub, and a small model in a repository's layout."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from engines import LAUNCH, ROOT
from fork_server import ForkedPython
from safetensors.numpy import load, save

NAME = "org/tiny-model"
GENERATE = ("generate", "--prompt", "a")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
RESOLVE = (
    "import logging, sys; from pathlib import Path; from launch.hub import model_folder;"
    "logging.basicConfig(level='INFO', format='[%(name)s] %(message)s');"
    "print(model_folder(Path(sys.argv[1]), download=True))"
)
# Without the seconds for which huggingface_hub waits before it tries again.
COMPLAIN = (
    "import json, sys, time; time.sleep = int; from launch.cli import main;"
    "ask = ['generate', '--prompt', 'a', '--log-level', 'warning', '--model'];"
    "print(json.dumps([main([*ask, name]) for name in sys.argv[1:]]))"
)
IMPATIENT = "import sys, time; time.sleep = int; from launch.cli import main; sys.exit(main(sys.argv[1:]))"
WANTED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/rag.jinja",
    INDEX,
    *SHARDS,
}


def repository_files(model: Path) -> dict[str, bytes]:
    """A model in two shards, beside files that must not be downloaded."""
    content = {path.name: path.read_bytes() for path in model.iterdir()}
    tensors = sorted(load(content.pop("model.safetensors")).items())
    halves = (dict(tensors[::2]), dict(tensors[1::2]))
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    content |= {shard: save(half) for shard, half in zip(SHARDS, halves, strict=True)}
    content[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    content["generation_config.json"] = b'{"eos_token_id": [2]}'
    content["additional_chat_templates/rag.jinja"] = b"rag"
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth", "modeling_tiny.py")
    content |= dict.fromkeys((*unwanted, "original/tokenizer.model", "onnx/model.safetensors"), b"x" * 99)
    return content | {"README.md": b"# A model"}


class Home:
    """A user's environment: a cache of the Hub and the Hub's address."""

    def __init__(self, folder: Path, endpoint: str | None) -> None:
        self.cache = folder / "hf" / "hub"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        self.env |= {"HF_HOME": str(folder / "hf")}
        if endpoint is not None:
            self.env["HF_ENDPOINT"] = endpoint

    def start(self, *command: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return ForkedPython(*command, cwd=cwd, env=self.env, stdout=pipe, stderr=pipe)

    def resolve(self, name: str = NAME) -> tuple[Path, str]:
        """The model's folder, and the lines on stderr."""
        process = self.start("-c", RESOLVE, name)
        out, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        return Path(out.strip()), log

    def complaint(self, name: str = NAME, code: int = 2, command: Sequence[str] = GENERATE) -> str:
        """The line with which a command of launch.py refuses a model."""
        process = self.start(LAUNCH, *command, "--model", name, "--log-level", "warning")
        out, log = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, ""), log
        assert log.startswith(f"launch.py: {name}"), log
        assert log.count("\n") == 1, log
        return log

    def complaints(self, *names: str) -> list[tuple[int, str]]:
        """The exit codes and lines with which launch.py refuses models, in one process."""
        process = self.start("-c", COMPLAIN, *names)
        out, log = process.communicate(timeout=60)
        found = list(zip(json.loads(out), log.splitlines(), strict=True))
        for name, (_, line) in zip(names, found, strict=True):
            assert line.startswith(f"launch.py: {name}"), line
        return found

    def unfinished(self) -> list[Path]:
        return list(self.cache.rglob("*.incomplete"))
