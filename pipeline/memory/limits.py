"""How much of a model fits: experts on the device, tokens in the KV cache; what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config import DEFAULT_CONTEXT, KV_CONTEXTS
from pipeline.errors import UsageError
from pipeline.models.spec import ModelSpec

STAGING_TILES = 4  # slots beside the cache's: two to stream, two more so that neither side waits
CHUNK_MAX = 1024  # rows of a step, where --chunk does not say otherwise


def cache_tiles(share: float, tiles: int) -> int:
    """This share of the tiles, rounded down; 0.29 of 100 are 29, although the product is a little less."""
    return int(share * tiles + 1e-9)


def choose_context(asked: int | None, spec: ModelSpec) -> int:
    """Tokens of prompt and answer together. Raises UsageError beyond what the model was made for."""
    if asked is None:
        return min(spec.max_positions, DEFAULT_CONTEXT)
    if asked > spec.max_positions:
        raise UsageError(f"--context {asked} is more than the model's {spec.max_positions} positions")
    return asked


def kv_budget(asked: int | None, context: int) -> int:
    """Tokens that the KV cache holds. Raises UsageError where not even one full context would fit."""
    if asked is None:
        return KV_CONTEXTS * context
    if asked < context:
        raise UsageError(
            f"--kv-tokens {asked} is less than one context of {context}; lower --context as well"
        )
    return asked


@contextmanager
def full_memory_in_one_line() -> Iterator[None]:
    """Make a device allocation that failed the user's to change: raises UsageError."""
    import torch  # here, because the supervisor plans with the rest of this module and has no use for it

    try:
        yield
    except torch.OutOfMemoryError as e:
        what = ". ".join(str(e).split(". ")[:2])  # the rest is about torch's allocator
        raise UsageError(f"{what}: use a smaller --expert-cache, --context or --chunk") from e
