"""The warning of a start on a full disk: which entries of the cache could be removed, and how."""

from __future__ import annotations

from pathlib import Path

from launch.cache.command import describe, free_bytes, select
from launch.cache.entries import scan
from pipeline.backbone import disk_cache as backbone_cache
from pipeline.checkpoint.open import open_model
from pipeline.config import ResolvedConfig
from pipeline.memory.needs import Needs
from pipeline.models.registry import expert_shape
from protocol.program import COMMAND
from shm.disk_cache import store_path
from shm.layout import format_named
from shm.segment import byte_size

MOST_NAMED = 3  # entries


def missing_bytes(model: Path, config: ResolvedConfig, needs: Needs, folder: Path) -> int:
    """Returns the bytes that an engine would write to the disk cache. Raises ModelError, UsageError."""
    source = open_model(model)
    shape = expert_shape(source.config, config.tile, format_named(config.format))
    store = source.fingerprint(config.format, shape.tile)
    backbone = backbone_cache.backbone_fingerprint(source, config.backbone_dtype)
    missing = 0
    if source.worth_keeping(config.format) and not store_path(folder, store).exists():
        missing += needs.store
    written = needs.backbone_file and source.worth_keeping(config.backbone_dtype)
    if written and not (folder / backbone / backbone_cache.NAME).exists():
        missing += needs.backbone_file
    return missing


def full_disk_line(folder: Path, missing: int) -> str:
    """One line where so many bytes do not fit the disk, else nothing."""
    free = free_bytes(folder)
    if missing <= free:
        return ""
    line = f"the disk of {folder} has {byte_size(free)} free, and {byte_size(missing)} would be kept there: "
    entries = [entry for entry in scan(folder) if entry.on_disk]
    size = sum(entry.size for entry in entries)
    removable = select(entries, None, 0).remove
    most = sum(entry.size for entry in removable)
    if free + most < missing:
        can = f"only {byte_size(most)} there" if most else "nothing there"
        lack = byte_size(missing - free)
        return line + f"{can} can be removed; free {lack} on that disk, or each start is as slow as this one"
    target = size - (missing - free)
    removable = select(entries, None, target).remove
    large = sorted(removable, key=lambda entry: -entry.size)[:MOST_NAMED]
    more = len(removable) - len(large)
    names = "; ".join(describe(entry) for entry in large) + f" and {more} more" * bool(more)
    return line + f"`{COMMAND} cache --prune --to {target // 10**6}MB` would remove {names}"
