"""The contents of a Hugging Face checkpoint folder, from its headers alone, checked before anything is
allocated for their claims. Every unusable folder raises a ModelError that names the file and the remedy.

A safetensors file begins with the header's length (8 bytes, little endian) and the header, a JSON object that
gives each tensor a dtype, a shape and `data_offsets` [begin, end) relative to the byte after the header. The
tensors cover the rest of the file exactly. The safetensors library is not used: its numpy interface has no
bfloat16, its errors name no remedy, and it maps files, so that a file that shrinks meanwhile ends the
process.
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
MAX_HEADER = 100_000_000  # bytes; the format's own limit
LFS_POINTER = b"version "  # the first bytes of the text file that git-lfs puts in place of a large one
MAX_TENSORS = 1 << 18  # of a model; the largest known one has half
BITS: dict[str, type[np.uint16] | type[np.uint32]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf")  # pickles, and llama.cpp's files
QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
DEQUANTIZED = ("fp8", "mxfp4")  # methods whose weights are read
# Part of every fingerprint; incremented when the same weights would get other bytes in the store.
ENCODER_VERSION = 3
FEW = 10_000  # tensors that are named in no time
MAX_NAME = 120  # characters of a tensor's name in a message

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """A tensor in a header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor: `nbytes` bytes from byte `offset` of `file`, row-major, little endian."""

    file: Path
    dtype: str  # safetensors' name: BF16, F16, F32, ...
    shape: tuple[int, ...]
    offset: int  # from the file's first byte
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file."""

    path: Path
    size: int
    mtime_ns: int
    header_digest: bytes
    tensors: dict[str, TensorEntry]


def read_shard(path: Path) -> Shard:
    """Returns a file's header. Raises ModelError, one line, where it is missing, cut short or damaged."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            begin = file.read(8)
            if begin == LFS_POINTER:
                raise ModelError(f"{path} is a git-lfs pointer and not the weights: run `git lfs pull` there")
            length = int.from_bytes(begin, "little")
            if status.st_size < 8 or length > status.st_size - 8:
                raise ModelError(f"{path} is cut short within its header: download it again")
            if length > MAX_HEADER:
                raise ModelError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header = file.read(length)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the download is incomplete") from None
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None
    if len(header) != length:
        raise ModelError(f"{path} changed while it was read")
    if header.count(b'"data_offsets"') > MAX_TENSORS:  # before objects are made of them
        raise ModelError(f"{path} has more than {MAX_TENSORS} tensors, which makes no sense")
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ModelError(f"{path} is damaged: its header is not a JSON object") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is damaged: its header is not valid JSON") from None
    fields.pop("__metadata__", None)
    tensors = {name: _located(path, name, field, 8 + length) for name, field in fields.items()}
    _check_cover(path, tensors, 8 + length, status.st_size)
    digest = hashlib.blake2b(header, digest_size=32).digest()
    return Shard(path, status.st_size, status.st_mtime_ns, digest, tensors)


def _located(path: Path, name: str, field: msgspec.Raw, start: int) -> TensorEntry:
    damaged = f"{path} is damaged: the header's entry {name[:80]!r}"
    try:
        entry = msgspec.json.decode(field, type=_Entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise ModelError(f"{damaged}: {str(e)[:120]}") from None
    if entry.dtype not in DTYPE_BYTES:
        raise ModelError(f"{damaged} has the unknown dtype {entry.dtype[:40]!r}")
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
        raise ModelError(f"{damaged} claims {end - begin} bytes, which is not its shape's and dtype's size")
    return TensorEntry(path, entry.dtype, entry.shape, start + begin, end - begin)


def _check_cover(path: Path, tensors: dict[str, TensorEntry], start: int, size: int) -> None:
    """Raises ModelError unless the tensors, in order, cover the file from byte `start` to its end."""
    position = start
    cut = None  # the first tensor that is not wholly in the file
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            what = "overlap" if entry.offset < position else "leave a hole"
            raise ModelError(f"{path} is damaged: its tensors {what} before {name[:80]!r}")
        position += entry.nbytes
        if position > size and cut is None:
            cut = name
    if cut is not None:
        raise ModelError(
            f"{path} has {size} of {position} bytes, it ends before the end of {cut[:80]!r}: "
            "the download is incomplete"
        )
    if position < size:
        raise ModelError(f"{path} is damaged: {size - position} bytes follow its last tensor")


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
            raise ModelError(f"{folder} is not a directory: give a checkpoint's, or a file NAME.gguf")
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
