"""The contents of a Hugging Face checkpoint directory, from its headers alone. Every unusable directory
raises a ModelError that names the file and the remedy."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import msgpack

from pipeline.checkpoint.header import MAX_TENSORS, Shard, TensorEntry, read_shard
from pipeline.errors import ModelError
from protocol.files import MAX_SETTINGS, read_json
from shm.layout import FORMATS, FloeFormat

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26  # of the list of tensors; the largest known one has a quarter
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
# Part of every fingerprint; incremented when the same weights would get other bytes in the store.
ENCODER_VERSION = 2
TWO_BITS_VERSION = 3  # the same of formats with matrices in 2 bits


@dataclass(frozen=True)
class CheckpointIndex:
    """A complete checkpoint: its config and the location of each tensor."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def listing(self) -> Path:
        """The file that lists the tensors."""
        return self.shards[0].path if len(self.shards) == 1 else self.folder / INDEX_FILE

    @classmethod
    def open(cls, folder: Path) -> CheckpointIndex:
        """Read config.json and the headers of all shards. Raises ModelError, one line, for a directory that
        is missing, incomplete, damaged, quantized, or without safetensors."""
        try:
            exists = folder.exists()
        except OSError as e:  # too long a name, or no permission
            raise ModelError(f"the model directory {folder} cannot be read: {e.strerror}") from None
        if not exists:
            hub = "; a model of the Hub is written ORG/NAME" if str(folder) == folder.name else ""
            raise ModelError(f"the model directory {folder} does not exist{hub}")
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a directory: give a Hugging Face checkpoint directory")
        config = read_fields(folder / CONFIG_FILE)
        _refuse_quantized(folder / CONFIG_FILE, config)
        # A single file takes precedence, as in transformers, which may leave an old index beside it.
        listed = {} if (folder / SINGLE_FILE).exists() else _weight_map(folder)
        names = sorted(set(listed.values())) or [_single_file(folder)]
        missing = [name for name in names if not os.path.exists(folder / name)]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files (the first is "
                f"{missing[0][:80]}): the download is incomplete"
            )
        shards: list[Shard] = []
        tensors: dict[str, TensorEntry] = {}
        for file in names:
            shards.append(read_shard(folder / file))
            if len(tensors) + len(shards[-1].tensors) > MAX_TENSORS:
                raise ModelError(f"{folder} has more than {MAX_TENSORS} tensors, which makes no sense")
            for name, entry in shards[-1].tensors.items():
                if name in tensors:
                    raise ModelError(
                        f"{folder} is damaged: {name[:80]!r} is in {tensors[name].file.name} and in "
                        f"{entry.file.name}"
                    )
                tensors[name] = entry
        for name, file in listed.items():
            if name not in tensors or tensors[name].file.name != file:
                raise ModelError(f"{folder} is damaged: {INDEX_FILE} lists {name[:80]!r} in {file}")
        return cls(folder, config, tuple(shards), tensors)


def fingerprint(index: CheckpointIndex, format_name: str, tile: int) -> str:
    """64 hex digits that change whenever the store's bytes would: a hash of config, headers, sizes and times
    of the files, format, tile size in channels, and encoder. Reads no weights."""
    facts = {
        "encoder": TWO_BITS_VERSION if _has_two_bits(format_name) else ENCODER_VERSION,
        "format": format_name,
        "tile": tile,
        "config": json.dumps(index.config, sort_keys=True),
        "shards": [(s.path.name, s.size, s.mtime_ns, s.header_digest) for s in index.shards],
    }
    return hashlib.blake2b(msgpack.encode(facts), digest_size=32).hexdigest()


def _has_two_bits(format_name: str) -> bool:
    tile_format = FORMATS.get(format_name)
    return isinstance(tile_format, FloeFormat) and tile_format.up.bits == 2


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name from the shards' index; empty where there is no index."""
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    names = read_fields(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path} is damaged: it has no weight_map")
    for file in names.values():
        # The index is untrusted: it may only name files beside it.
        own = isinstance(file, str) and file.isprintable() and Path(file).name == file
        if not own or not file.endswith(".safetensors"):
            raise ModelError(f"{path} is damaged: {str(file)[:80]!r} is not a safetensors file beside it")
    return names


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    for key in QUANTIZED:
        if config.get(key):
            method = config[key].get("quant_method") if isinstance(config[key], dict) else None
            what = f" ({method[:40]})" if isinstance(method, str) else ""
            raise ModelError(
                f"{path} has a {key}{what}: checkpoints that are quantized already are not read; download "
                "the original one, and Tandem quantizes it (--format int8, int4)"
            )


def _single_file(folder: Path) -> str:
    """The one weight file of a checkpoint without an index."""
    if (folder / SINGLE_FILE).exists():
        return SINGLE_FILE
    wanted = f"{SINGLE_FILE}, or {INDEX_FILE} with its files"
    found = _first(folder, "*.safetensors")
    if found is not None and re.fullmatch(r"model-\d+-of-\d+\.safetensors", found):
        raise ModelError(f"{folder} has {found} but not {INDEX_FILE}: the download is incomplete")
    if found is not None:
        raise ModelError(
            f"{folder} has {found}, which is not a checkpoint as transformers writes it: {wanted}, is "
            "wanted: download those"
        )
    pickle = _first(folder, *PICKLES)
    if pickle is not None:
        raise ModelError(
            f"{folder} has its weights in {pickle}, a pickle, which can run any code when it is read: it is "
            "not opened; download the safetensors files, or convert it with transformers' save_pretrained"
        )
    _refuse_gguf(folder)
    raise ModelError(f"{folder} has no weights: {SINGLE_FILE} and {INDEX_FILE} are both missing")


def _refuse_gguf(folder: Path) -> None:
    gguf = _first(folder, "*.gguf")
    if gguf is not None:
        raise ModelError(
            f"{folder} has its weights in {gguf}, llama.cpp's format, which is not read: download the "
            "original checkpoint's safetensors files"
        )


def _first(folder: Path, *patterns: str) -> str | None:
    """The first file of these kinds, by name."""
    return min((path.name for pattern in patterns for path in folder.glob(pattern)), default=None)


def check_place(path: Path, folder: Path) -> None:
    """Raises ModelError where a file of a model's folder is a link out of it: a model that is not trusted
    would choose which of the user's files becomes a part of its answers. The Hub's cache has links within
    models--ORG--NAME, from snapshots/REVISION. Weights may be anywhere: they are only numbers."""
    own, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if own.parent.name == "snapshots" and own.parent.parent.name.startswith("models--"):
        own = own.parent.parent
    if not real.is_relative_to(own):
        raise ModelError(f"{path} cannot be read: it is a link out of the model's folder; put a copy there")


def read_fields(path: Path, limit: int = MAX_SETTINGS) -> dict[str, Any]:
    """The object in a JSON file of a model, of at most `limit` bytes. Raises ModelError."""
    check_place(path, path.parent)
    try:
        fields = read_json(path, limit)
    except FileNotFoundError:
        _refuse_gguf(path.parent)
        raise ModelError(
            f"{path.parent} has no {path.name}: it is not a complete Hugging Face checkpoint directory"
        ) from None
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is damaged: it is not valid JSON") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} is damaged: it is not a JSON object")
    return fields
