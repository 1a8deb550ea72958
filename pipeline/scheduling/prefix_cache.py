"""Allocates the KV cache's capacity, and keeps the sequences of conversations in its free part between their
turns.

Where a request needs the capacity, the least recently used kept sequence is evicted. Handles token ids, no
requests and no text. Used by the engine's thread alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.backbone.kv_blocks import blocks_for
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.config import KV_BLOCK

PrefixKey = tuple[bytes, str]  # of a conversation: its client, and the client's name for it


@dataclass(frozen=True)
class _Kept:
    tokens: list[int]  # of the filled part
    kv: SequenceKV


class PrefixCache:
    """The kept sequences of all clients, the least recently used first."""

    def __init__(self, kv: KVCache) -> None:
        self.tokens = 0  # capacity of all kept sequences
        self._kv = kv
        self._kept: OrderedDict[PrefixKey, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def available(self) -> int:
        """Blocks that are free once every kept sequence is evicted."""
        return self._kv.free + self.tokens // KV_BLOCK

    @property
    def has_place(self) -> bool:
        """Whether another sequence may exist then."""
        return self._kv.places != 0 or len(self) > 0

    def allocate(self, tokens: int, key: PrefixKey | None, prompt: Sequence[int]) -> SequenceKV:
        """Returns a sequence with room for so many tokens, which are `available`, where it `has_place`: the
        one kept under `key`, as `take`, else an empty one."""
        kept = None if key is None else self.take(key, prompt)
        if kept is None:
            self.evict_for(blocks_for(tokens))
            if self._kv.places == 0:
                self._evict(next(iter(self._kept)))
            return self._kv.allocate(tokens)
        self.grow(kept, tokens)
        return kept

    def grow(self, kv: SequenceKV, tokens: int) -> bool:
        """Give a sequence room for so many tokens. False where the blocks are not available."""
        if not self.evict_for(kv.missing(tokens)):
            return False
        kv.grow(tokens)
        return True

    def keep(self, key: PrefixKey, tokens: Sequence[int], kv: SequenceKV) -> None:
        """Keep a sequence, filled with the first of `tokens`, in place of the one under this key."""
        self._evict(key)
        kv.truncate(kv.length)
        self._kept[key] = _Kept(list(tokens[: kv.length]), kv)
        self.tokens += kv.capacity

    def take(self, key: PrefixKey, prompt: Sequence[int]) -> SequenceKV | None:
        """Returns the sequence kept under this key, truncated to the prefix that it shares with `prompt`
        without its last token, which must be computed for its logits; of a recurrent model to the longest
        snapshot within it. None where nothing is left."""
        kept = self._remove(key)
        if kept is None:
            return None
        common = kept.kv.reachable(common_prefix(kept.tokens, prompt[:-1]))
        if common == 0:
            self._kv.release(kept.kv)
            return None
        kept.kv.truncate(common)
        kept.kv.renumber()
        return kept.kv

    def evict_for(self, blocks: int) -> bool:
        """Evict sequences until so many blocks are free. False, evicting none, where that is not enough."""
        if blocks > self.available:
            return False
        while blocks > self._kv.free:
            self._evict(next(iter(self._kept)))
        return True

    def forget(self, client: bytes) -> None:
        """Evict the conversations of a client that has disconnected."""
        for key in [key for key in self._kept if key[0] == client]:
            self._evict(key)

    def _evict(self, key: PrefixKey) -> None:
        kept = self._remove(key)
        if kept is not None:
            self._kv.release(kept.kv)

    def _remove(self, key: PrefixKey) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.tokens -= kept.kv.capacity
        return kept


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of equal leading tokens."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
