"""Limits of an engine's memory: tiles of the cache, tokens of a context and the KV cache, rows of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from pipeline.config import DEFAULT_CONTEXT, KV_CONTEXTS
from pipeline.errors import UsageError
from pipeline.models.spec import ModelSpec

STAGING_TILES = 4  # slots beside the cache's: two to stream through, two so that neither side waits
STAGING_SHARE = 1 / 32  # of a GPU's free memory, at most, for more staging slots than the fewest
CHUNK_MAX = 1024  # rows of a step, where --chunk does not say otherwise


def staging_tiles(tiles: int, top_k: int, heads: bool) -> int:
    """The fewest slots beside the cache's, for experts of so many tiles, k of them a token. A format with
    `heads` streams channels: there is room for a third of two layers' experts, this one's and the next
    one's."""
    return max(STAGING_TILES, 2 * top_k * ceil(tiles / 3) + 2) if heads else STAGING_TILES


def layer_staging(tiles: int, top_k: int) -> int:
    """Slots beside the cache's with which no demanded tile of one token waits for a slot: its experts of a
    layer, and the two tiles that the link may still be copying for orders that were cancelled."""
    return max(STAGING_TILES, top_k * tiles + 2)


def cache_tiles(share: float, tiles: int) -> int:
    """This share of the tiles, rounded down; 0.29 of 100 is 29, though the float product is less."""
    return int(share * tiles + 1e-9)


def choose_context(requested: int | None, spec: ModelSpec) -> int:
    """Tokens of prompt and answer together. Raises UsageError beyond the model's positions."""
    if requested is None:
        return min(spec.max_positions, DEFAULT_CONTEXT)
    if requested > spec.max_positions:
        raise UsageError(f"--context {requested} is more than the model's {spec.max_positions} positions")
    return requested


def kv_budget(requested: int | None, context: int) -> int:
    """Tokens that the KV cache holds. Raises UsageError for less than one context."""
    if requested is None:
        return KV_CONTEXTS * context
    if requested < context:
        raise UsageError(
            f"--kv-tokens {requested} is less than one context of {context}; lower --context as well"
        )
    return requested


@contextmanager
def full_memory_in_one_line() -> Iterator[None]:
    """Turn a failed device allocation into a UsageError with the options to change."""
    import torch  # not at the top, because the supervisor plans memory without torch

    try:
        yield
    except torch.OutOfMemoryError as e:
        raise UsageError(out_of_memory(e)) from e


def out_of_memory(error: Exception) -> str:
    """A failed device allocation in one line for a person, with what to change."""
    what = ". ".join(str(error).split(". ")[:2])  # the rest of the message is about torch's allocator
    return f"{what}: use a smaller --expert-cache, --context or --chunk"
