"""A calibration on disk, `<cache folder>/<fingerprint>/calibration.safetensors`, and as a few numbers.

The tensors are the arrays of `Calibration` by their names (accuracy.raw, accuracy.residual, accuracy.first,
and the same of gated_accuracy); an array that could not be measured is absent. `__metadata__` has one entry,
"tandem", a JSON object:
`version`, `fingerprint` (of the model, the folder's name), `threshold`, `up`, `max_loss` and `sparsity` as in
`Calibration`, `about` (how it was measured, see docs/calibration.md), and `crc32` of all of these and of the
tensors. Files are 0600 in a 0700 folder; a file
that another user may have written is not used. They are written under a temporary name and renamed when
complete.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pipeline.checkpoint.model_source import ModelSource
from pipeline.errors import CalibrationError
from pipeline.policies.calibration import Calibration
from protocol.errors import NotPrivate
from protocol.files import check_private, make_folders, read_small
from shm.atomic_file import atomic_file
from shm.disk_cache import CacheRecord, note_use

NAME = "calibration.safetensors"
VERSION = 7
KEY = "tandem"  # of the metadata
NUMBERS = ("threshold", "up", "max_loss", "sparsity")  # of a Calibration, beside its arrays
MOST_BYTES = 1 << 28
REMEDY = "remove it and calibrate again"

Array = NDArray[Any]


def calibration_path(cache: Path, source: ModelSource) -> Path:
    """The file of a model's calibration, which serves all formats of its experts."""
    return cache / source.fingerprint("calibration", 0) / NAME


def save(path: Path, calibration: Calibration, about: dict[str, Any]) -> None:
    """Write the file, replacing an older one. `about` is JSON-like. Raises OSError; a file that was not
    complete is removed then."""
    tensors = {name: np.ascontiguousarray(array) for name, array in _arrays(calibration).items()}
    facts: dict[str, Any] = {
        "version": VERSION,
        "fingerprint": path.parent.name,
        **{name: getattr(calibration, name) for name in NUMBERS},
        "about": about,
    }
    facts["crc32"] = _checksum(facts, tensors)
    make_folders(path.parent)
    path.parent.chmod(0o700)
    with atomic_file(path) as file:
        file.write(save_tensors(tensors, {KEY: json.dumps(facts)}))
    note_use(path.parent, _record(about))


def load(path: Path) -> Calibration:
    """Read a calibration. Raises CalibrationError, one line that names the file, where the file is missing,
    damaged, of another model or of another version."""
    calibration, about = read(path)
    note_use(path.parent, _record(about))
    return calibration


def read(path: Path) -> tuple[Calibration, dict[str, Any]]:
    """Returns what `load` does, and the `about` of `save`."""
    data = _bytes_of_own(path)
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        facts = json.loads(header["__metadata__"][KEY])
        tensors: dict[str, Array] = load_tensors(data)
        version, fingerprint, checksum = facts["version"], facts["fingerprint"], facts.pop("crc32")
        about = dict(facts["about"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        raise _unusable(path, f"it is not a complete calibration ({type(e).__name__})") from None
    if version != VERSION:
        raise _unusable(path, f"it is of version {str(version)[:20]}, this program's is {VERSION}")
    if fingerprint != path.parent.name:
        raise _unusable(path, "it belongs to another model")
    if checksum != _checksum(facts, tensors):
        raise _unusable(path, "it is damaged")
    try:
        return _calibration(tensors, facts), about
    except (TypeError, KeyError) as e:
        raise _unusable(path, f"it is not a complete calibration ({e})") from None


def summary(calibration: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    """The answer to a client: `about`, and means over the layers."""
    figures: dict[str, Any] = {
        "accuracy": {name: mean_accuracy(calibration, name) for name in ("raw", "residual", "first")},
        **{name: getattr(calibration, name) for name in NUMBERS},
    }
    needed = calibration.needed
    return about | figures | {"single_expert_share": None if needed is None else float(needed[:, 1].mean())}


def mean_accuracy(calibration: Calibration, predictor: str) -> float | None:
    """Mean over the layers that the predictor predicts; None without any."""
    if predictor == "first":
        return None if calibration.first_gate is None else float(calibration.accuracy["first"][0])
    predicted = calibration.accuracy[predictor][1:]
    return float(predicted.mean()) if len(predicted) else None


def _record(about: dict[str, Any]) -> CacheRecord:
    return CacheRecord("calibration", str(about.get("model", "")), "")


def _checksum(facts: dict[str, Any], tensors: dict[str, Array]) -> int:
    checksum = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        checksum = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), checksum))
    return checksum


def _unusable(path: Path, reason: str) -> CalibrationError:
    return CalibrationError(f"the calibration {path} cannot be used: {reason}; {REMEDY}")


def _arrays(calibration: Calibration) -> dict[str, Array]:
    """The arrays by their names in the file."""
    arrays = {name: array for name, array in vars(calibration).items() if isinstance(array, np.ndarray)}
    for table in ("accuracy", "gated_accuracy"):
        arrays |= {f"{table}.{name}": array for name, array in vars(calibration)[table].items()}
    return arrays


def _bytes_of_own(path: Path) -> bytes:
    """The content of a regular file that only this user may have written. Raises CalibrationError."""
    try:
        return read_small(path, MOST_BYTES, check=check_private)
    except NotPrivate as e:
        raise _unusable(path, f"it {e}") from None
    except OSError as e:
        raise _unusable(path, e.strerror or str(e)) from None


def _calibration(tensors: dict[str, Array], facts: dict[str, Any]) -> Calibration:
    """The inverse of `_arrays`, with the numbers. Raises TypeError for an unknown or missing array."""
    arrays: dict[str, Any] = {}
    for name, array in tensors.items():
        array.flags.writeable = False
        table, _, key = name.partition(".")
        if key:
            arrays.setdefault(table, {})[key] = array
        else:
            arrays[name] = array
    return Calibration(**arrays, **{name: facts[name] for name in NUMBERS})
