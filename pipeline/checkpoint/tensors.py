"""Checks that a checkpoint has the tensors that its config.json requires, from the headers alone."""

from __future__ import annotations

from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import BITS
from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.spec import ModelSpec

FEW = 10_000  # tensors that are named in no time
MAX_NAME = 120  # characters of a tensor's name in a message


def check_tensors(index: CheckpointIndex, architecture: Architecture, spec: ModelSpec, fused: bool) -> None:
    """Raises ModelError, one line, for missing, unknown, misshapen tensors or unsupported dtypes."""
    fewest = architecture.fewest_tensors(spec, fused)
    if fewest > 2 * len(index.tensors) + FEW:
        raise ModelError(
            f"{index.listing} has {len(index.tensors)} tensors, and config.json describes more than {fewest}:"
            " the download is incomplete, or config.json is another model's"
        )
    required = architecture.tensors(spec, fused)
    missing = [name for name in required if name not in index.tensors]
    if missing:
        raise ModelError(
            f"{index.listing} lacks the tensor {missing[0]}{_others(missing)}: the download is "
            "incomplete, or config.json is another model's"
        )
    misshapen = [name for name, shape in required.items() if index.tensors[name].shape != shape]
    if misshapen:
        name = misshapen[0]
        entry = index.tensors[name]
        raise ModelError(
            f"{entry.file}: the tensor {name} has the shape {list(entry.shape)}; config.json gives "
            f"{list(required[name])}{_others(misshapen, 'differ')}"
        )
    unread = [name for name in required if index.tensors[name].dtype not in BITS]
    if unread:
        entry = index.tensors[unread[0]]
        raise ModelError(
            f"{entry.file}: the tensor {unread[0]} has the dtype {entry.dtype}; "
            f"only {', '.join(BITS)} are read{_others(unread, 'have such')}: "
            "download the checkpoint that is not quantized"
        )
    unexpected = sorted(n for n in index.tensors if n not in required and not architecture.optional(n, spec))
    if unexpected:
        name = unexpected[0]
        raise ModelError(
            f"{index.tensors[name].file}: the tensor {name[:MAX_NAME]} is not one of a "
            f"{architecture.model_type} model{_others(unexpected)}: config.json is another model's, or of a "
            "variant that is not supported"
        )


def _others(names: list[str], verb: str = "") -> str:
    """The number of names after the first, in parentheses; empty where it is the only one."""
    number = len(names) - 1
    return f" (and {number} other{'s' * (number > 1)}{f' {verb}' if verb else ''})" if number else ""
