"""A calibration on disk, `<cache folder>/<fingerprint>/calibration.safetensors`, and as a few numbers.

The tensors are the arrays of `Calibration` by their names (accuracy.raw, accuracy.residual, accuracy.first,
the same of gated_accuracy, and hit_rates.lcp, .lru and .lfu);
an array that could not be measured is absent. `__metadata__` has one entry, "tandem", a JSON object:
`version`, `fingerprint` (of the model, the folder's name), `threshold`, `up`, `max_loss` and `sparsity` as in
`Calibration`, `about` (how it was measured, see docs/calibration.md), and `crc32` of all of these and of the
tensors. Files are 0600 in a 0700 folder; a file
that another user may have written is not used. They are written under a temporary name and renamed when
complete.
"""

from __future__ import annotations

import json
import math
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
from pipeline.policies.calibration import MOST, Calibration
from pipeline.policies.split import PRIORITIES
from protocol.errors import NotPrivate
from protocol.private_files import check_private, make_folders
from protocol.small_files import read_small
from shm.atomic_file import atomic_file
from shm.disk_cache import CacheRecord, note_use

NAME = "calibration.safetensors"
VERSION = 6
KEY = "tandem"  # of the metadata
PREDICTORS = ("raw", "residual", "first")
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
        "threshold": calibration.threshold,
        "up": calibration.up,
        "max_loss": calibration.max_loss,
        "sparsity": calibration.sparsity,
        "about": about,
    }
    facts["crc32"] = _checksum(facts, tensors)
    make_folders(path.parent)
    path.parent.chmod(0o700)
    with atomic_file(path) as file:
        file.write(save_tensors(tensors, {KEY: json.dumps(facts)}))
    note_use(path.parent, _record(about))


def load(path: Path) -> Calibration:
    """A calibration with consistent shapes. Raises CalibrationError, one line that names the file, where the
    file is missing, damaged, of another model or of another version."""
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
        return _checked(tensors, facts), about
    except ValueError as e:
        raise _unusable(path, str(e)) from None


def summary(calibration: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    """The answer to a client: `about`, and means over the layers."""
    figures: dict[str, Any] = {
        "accuracy": {name: mean_accuracy(calibration, name) for name in ("raw", "residual", "first", "mlp")},
        "similarity": float(calibration.similarity.mean()),
        "threshold": calibration.threshold,
        "up": calibration.up,
        "max_loss": calibration.max_loss,
        "sparsity": calibration.sparsity,
        "single_expert_share": None,
        "experts_per_token": None,
    }
    if (needed := calibration.needed) is not None:
        figures["single_expert_share"] = float(needed[:, 1].mean())
        figures["experts_per_token"] = float(experts_per_token(needed).mean())
    return about | figures


def mean_accuracy(calibration: Calibration, predictor: str) -> float | None:
    """Mean over the layers that the predictor predicts; None without any."""
    if predictor == "first":
        return None if calibration.first_gate is None else float(calibration.accuracy["first"][0])
    if predictor == "mlp":  # by the next gate where that is better
        mlps = calibration.mlp_accuracy
        raw = calibration.accuracy["raw"][1:]
        if mlps is None:
            return None
        return float(np.concatenate((np.maximum(mlps, raw[: len(mlps)]), raw[len(mlps) :])).mean())
    predicted = calibration.accuracy[predictor][1:]
    return float(predicted.mean()) if len(predicted) else None


def experts_per_token(needed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Experts per token [L], from the shares [L, k + 1]."""
    return needed @ np.arange(needed.shape[1])


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
    for table in ("accuracy", "gated_accuracy", "hit_rates"):
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


def _checked(tensors: dict[str, Array], facts: dict[str, Any]) -> Calibration:
    """The calibration of these arrays and numbers. Raises ValueError that names an inconsistency."""

    def take(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        array = tensors.pop(name, None)
        if array is None:
            raise ValueError(f"{name} is missing")
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds values that are not finite")
        array.flags.writeable = False
        return array

    def optional(name: str, *shape: int) -> Array | None:
        return take(name, shape) if name in tensors else None

    def width(name: str, otherwise: int) -> int:
        """Columns of a matrix; no other array determines this size."""
        return tensors[name].shape[1] if name in tensors and tensors[name].ndim == 2 else otherwise

    counts = tensors.get("prefill_counts")
    if counts is None or counts.ndim != 2 or 0 in counts.shape:
        raise ValueError("prefill_counts is missing or not a matrix")
    layers, experts = counts.shape
    kept = tensors.get("kept")
    if kept is None or kept.ndim != 3 or kept.shape[1] < 2:
        raise ValueError("kept is missing or has no steps")
    steps, most = kept.shape[1:]
    inner = tensors.get("mlp_inner")
    predicted, wide, hidden = inner.shape if inner is not None and inner.ndim == 3 else (0, 0, 0)
    hidden = width("first_gate", hidden)
    result = Calibration(
        prefill_counts=take("prefill_counts", (layers, experts), "int64"),
        decode_counts=take("decode_counts", (layers, experts), "int64"),
        residual_logits=take("residual_logits", (layers - 1, experts)),
        accuracy={name: take(f"accuracy.{name}", (layers,)) for name in PREDICTORS},
        kept=take("kept", (layers, steps, most)),
        gated_accuracy={name: take(f"gated_accuracy.{name}", (layers, steps)) for name in PREDICTORS},
        sensitivity=optional("sensitivity", layers),
        threshold=_number(facts, "threshold"),
        first_gate=optional("first_gate", experts, hidden),
        hit_rates={name: take(f"hit_rates.{name}", (layers, experts + 1)) for name in PRIORITIES},
        magnitudes=optional("magnitudes", layers, sizes := width("magnitudes", 2)),
        left_mass=optional("left_mass", layers, sizes),
        mlp_inner=optional("mlp_inner", predicted, wide, hidden),
        mlp_outer=optional("mlp_outer", predicted, experts, wide),
        mlp_accuracy=optional("mlp_accuracy", predicted),
        up=str(facts.get("up", "")),
        max_loss=_number(facts, "max_loss"),
        sparsity=_number(facts, "sparsity"),
    )
    if tensors:
        raise ValueError(f"it holds {min(tensors)[:40]!r}, an unknown array")
    if min(result.prefill_counts.min(), result.decode_counts.min()) < 0:
        raise ValueError("a count is below 0")
    tables = (result.accuracy, result.gated_accuracy, result.hit_rates)
    rates = [array for table in tables for array in table.values()]
    mlps = (result.mlp_inner, result.mlp_outer, result.mlp_accuracy)
    if result.mlp_accuracy is not None:
        rates.append(result.mlp_accuracy)
    if len({array is None for array in mlps}) > 1 or (mlps[0] is not None and len(mlps[0]) >= layers):
        raise ValueError("mlp_inner, mlp_outer and mlp_accuracy are not all there, or of too many layers")
    if any((array < 0).any() or (array > 1).any() for array in rates):
        raise ValueError("an accuracy or a hit rate is outside 0..1")
    _check_magnitudes(result)
    if result.sensitivity is not None and (result.sensitivity < 0).any():
        raise ValueError("a sensitivity is below 0")
    shares = result.kept
    if most > experts + 1 or (shares < 0).any() or abs(shares.sum(axis=-1) - 1).max() > 1e-4:
        raise ValueError("kept does not consist of shares")
    return result


def _check_magnitudes(calibration: Calibration) -> None:
    magnitudes, left = calibration.magnitudes, calibration.left_mass
    if (magnitudes is None) != (left is None) or (magnitudes is None) != (calibration.up == ""):
        raise ValueError("magnitudes, left_mass and up are not all there")
    if magnitudes is not None and left is not None:
        if magnitudes.shape[1] < 2 or left.max() > 1:
            raise ValueError("magnitudes has no steps, or left_mass does not consist of shares")
        if any((array < 0).any() or (np.diff(array) < 0).any() for array in (magnitudes, left)):
            raise ValueError("magnitudes or left_mass do not rise from 0 on")
    if calibration.sparsity is not None and (calibration.sparsity > MOST or calibration.max_loss is None):
        raise ValueError("its sparsity is not that of a bound")


def _number(facts: dict[str, Any], name: str) -> float | None:
    """Read a number; None where it is absent."""
    value = facts.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"its {name} is not a number of at least 0")
