"""The contents of a Hugging Face checkpoint folder, from its headers alone, checked before anything is
allocated for their claims. Every unusable folder raises a ModelError that names the file and the remedy.

The tensors of a quantized matrix are found here (`quantized.py`), and from then on are one matrix, with the name
and shape that it has in a checkpoint which is not quantized (`packed.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.facts import Headers, facts_of
from pipeline.models.spec import ModelSpec
from protocol.files import MAX_SETTINGS, open_regular, read_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26  # of the list of tensors; the largest known one has a quarter
BITS: dict[str, type[np.uint16] | type[np.uint32]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf")  # pickles, and llama.cpp's files
QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
DEQUANTIZED = ("fp8", "mxfp4")  # methods whose weights are read
# Part of every fingerprint; incremented when the same weights would get other bytes in the store.
ENCODER_VERSION = 3
FEW = 10_000  # tensors that are named in no time
MAX_NAME = 120  # characters of a tensor's name in a message

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

    @property
    def headers(self) -> Headers:
        return {name: (entry.dtype, entry.shape) for name, entry in self.tensors.items()}

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
    """64 hex digits that change whenever the store would: a hash of config, headers, sizes and times of the
    files, format, tile size in channels, the experts' kind, and encoder. Reads no weights."""
    facts = {
        "encoder": ENCODER_VERSION,
        "format": format_name,
        "tile": tile,
        "math": facts_of(index.config).math.plain(),
        "config": json.dumps(index.config, sort_keys=True),
        "shards": [(s.path.name, s.size, s.mtime_ns, s.header_digest) for s in index.shards],
    }
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=32).hexdigest()


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
            if key == "quantization_config" and method in DEQUANTIZED:
                continue
            what = f" ({method[:40]})" if isinstance(method, str) else ""
            raise ModelError(
                f"{path} has a {key}{what}: of checkpoints that are quantized already only those in "
                f"{' and '.join(DEQUANTIZED)} are read; download the original one, and Tandem quantizes it "
                "(--format int8, int4)"
            )


def _single_file(folder: Path) -> str:
    """The one weight file of a checkpoint without an index."""
    if (folder / SINGLE_FILE).exists():
        return SINGLE_FILE
    other = _first(folder, "*.safetensors", *FOREIGN)
    raise ModelError(
        f"{folder} has {other or 'no weights'}, and neither {SINGLE_FILE} nor {INDEX_FILE}: only whole "
        "checkpoints in safetensors are read, no pickles, which can run any code, and no GGUF: download those"
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


def check_tensors(index: CheckpointIndex, architecture: Architecture, spec: ModelSpec, fused: bool) -> None:
    """Raises ModelError, one line, for missing, unknown, misshapen tensors or unsupported dtypes."""
    fewest = architecture.fewest_tensors(spec, fused)
    if fewest > 2 * len(index.tensors) + FEW:
        raise ModelError(
            f"{index.listing} has {len(index.tensors)} tensors, and config.json describes more than {fewest}:"
            " the download is incomplete, or config.json is another model's"
        )
    required = architecture.tensors(spec, fused)
    for name, shape in required.items():
        entry = index.tensors.get(name)
        if entry is None:
            raise ModelError(
                f"{index.listing} lacks the tensor {name}: the download is incomplete, or config.json is "
                "another model's"
            )
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: the tensor {name} has the shape {list(entry.shape)}; config.json gives "
                f"{list(shape)}"
            )
        if entry.dtype not in BITS:
            raise ModelError(
                f"{entry.file}: the tensor {name} has the dtype {entry.dtype}; only {', '.join(BITS)} are "
                "read: download the checkpoint that is not quantized"
            )
    for name in sorted(index.tensors):
        if name not in required and not architecture.optional(name, spec):
            raise ModelError(
                f"{index.tensors[name].file}: the tensor {name[:MAX_NAME]} is not one of a "
                f"{architecture.model_type} model: config.json is another model's, or of a variant that is "
                "not supported"
            )
