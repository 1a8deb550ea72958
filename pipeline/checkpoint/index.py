"""The contents of a Hugging Face checkpoint folder, from its headers alone, checked before anything is
allocated for their claims. Every unusable folder raises a ModelError that names the file and the remedy.

The tensors of a quantized matrix are found here (`quantized.py`), and from then on are one matrix, with the
name and shape that it has in a checkpoint which is not quantized (`packed.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.checkpoint.headers import MAX_TENSORS, Shard, TensorEntry, read_shard
from pipeline.checkpoint.packed import Packed
from pipeline.checkpoint.quantized import MAX_NAME, WRONG, check_settings, find_packed
from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import DRAFTS
from pipeline.models.facts import Headers, facts_of
from pipeline.models.spec import ModelSpec
from protocol.files import MAX_SETTINGS, read_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26  # of the list of tensors; the largest known one has a quarter
BITS: dict[str, type[np.uint16] | type[np.uint32]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf")  # pickles, and llama.cpp's files
QUANTIZED = "quantization_config"  # a key of config.json, and of the text model's part of it
OLD_QUANTIZED = "compression_config"  # another one, of old versions of compressed-tensors
MODELOPT_FILE = "hf_quant_config.json"  # where modelopt has its settings, or had them in older versions
# Part of every fingerprint; incremented when the same weights would get other bytes in the store.
ENCODER_VERSION = 4
FEW = 10_000  # tensors that are named in no time


@dataclass(frozen=True)
class CheckpointIndex:
    """A complete checkpoint: its config, without what that says of quantization, and the location of each
    tensor."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorEntry]  # those that are no part of a quantized matrix
    packed: Mapping[str, Packed] = field(default_factory=dict)  # the quantized matrices
    quantization: Mapping[str, Any] | None = None  # what the config says of it

    @property
    def listing(self) -> Path:
        """The file that lists the tensors."""
        return self.shards[0].path if len(self.shards) == 1 else self.folder / INDEX_FILE

    @property
    def headers(self) -> Headers:
        """The headers as of a plain checkpoint, in which quantized matrices have the dtype F32."""
        plain = {name: (entry.dtype, entry.shape) for name, entry in self.tensors.items()}
        return plain | {name: ("F32", matrix.shape) for name, matrix in self.packed.items()}

    def file_of(self, name: str) -> Path:
        """The file that has a tensor, or the weights of a quantized matrix."""
        return (self.tensors[name] if name in self.tensors else self.packed[name].weight).file

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
            raise ModelError(f"{folder} is not a directory: give a checkpoint's, or a file NAME.gguf")
        config = read_fields(folder / CONFIG_FILE)
        config.pop(DRAFTS, None)
        quantization = _quantization(folder, config)
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
        if quantization is None:
            return cls(folder, config, tuple(shards), tensors)
        packed, plain = find_packed(quantization, tensors)
        return cls(folder, _unquantized(config), tuple(shards), plain, packed, quantization)


def fingerprint(index: CheckpointIndex, format_name: str, tile: int, converter: str = "") -> str:
    """64 hex digits that change whenever the store would, the same on every machine: a hash of config,
    headers, sizes and a few samples of the files, format, tile size in channels, the experts' kind, encoder,
    and what converts the tensors."""
    config = index.config if index.quantization is None else {**index.config, QUANTIZED: index.quantization}
    facts = {
        "encoder": ENCODER_VERSION,
        "converter": converter,
        "format": format_name,
        "tile": tile,
        "math": facts_of(index.config).math.plain(),
        "config": json.dumps(config, sort_keys=True),
        "shards": [(s.path.name, s.size, s.header_digest, s.sample_digest) for s in index.shards],
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


def _quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the folder's settings of quantization, None where it has none. Raises ModelError."""
    path, text = folder / CONFIG_FILE, config.get("text_config")
    settings = config.get(QUANTIZED) or (isinstance(text, dict) and text.get(QUANTIZED)) or None
    if config.get(OLD_QUANTIZED):
        settings = {"quant_method": f"an old version of compressed-tensors ({OLD_QUANTIZED})"}
    if settings is None and (folder / MODELOPT_FILE).exists():
        path = folder / MODELOPT_FILE
        settings = read_fields(path)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelError(f"{path} is damaged: its {QUANTIZED} is not a JSON object")
    if "quant_algo" not in settings and isinstance(settings.get("quantization"), dict):
        settings = {"quant_method": "modelopt", **settings["quantization"]}  # modelopt's own file
    check_settings(path, settings)
    return settings


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model without quantization."""
    plain = {key: value for key, value in config.items() if key != QUANTIZED}
    text = plain.get("text_config")
    return plain | {"text_config": _unquantized(text)} if isinstance(text, dict) else plain


def _single_file(folder: Path) -> str:
    """The one weight file of a checkpoint without an index."""
    if (folder / SINGLE_FILE).exists():
        return SINGLE_FILE
    other = _first(folder, "*.safetensors", *FOREIGN)
    raise ModelError(
        f"{folder} has {other or 'no weights'}, and neither {SINGLE_FILE} nor {INDEX_FILE}: checkpoints in "
        "safetensors are read whole, and GGUF files by their names, but no pickles, which can run any code"
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
    number = len(index.tensors) + len(index.packed)
    if fewest > 2 * number + FEW:
        raise ModelError(
            f"{index.listing} has {number} tensors, and config.json describes more than {fewest}:"
            " the download is incomplete, or config.json is another model's"
        )
    required = architecture.tensors(spec, fused)
    headers = index.headers
    for name, shape in required.items():
        if name not in headers:
            raise ModelError(f"{index.listing} lacks the tensor {name}: {WRONG}")
        dtype, found = headers[name]
        if found != shape:
            raise ModelError(
                f"{index.file_of(name)}: the tensor {name} has the shape {list(found)}; config.json gives "
                f"{list(shape)}"
            )
        if dtype not in BITS:
            raise ModelError(
                f"{index.file_of(name)}: the tensor {name} has the dtype {dtype}; only {', '.join(BITS)} are "
                "read: download the checkpoint that is not quantized"
            )
    for name in sorted(headers):
        if name not in required and not architecture.optional(name, spec):
            raise ModelError(
                f"{index.file_of(name)}: the tensor {name[:MAX_NAME]} is not one of a "
                f"{architecture.model_type} model: config.json is another model's, or of a variant that is "
                "not supported"
            )
