"""What was computed for conversations and may be needed again: their KV between two turns.

It lives in whatever the KV cache has left over: as soon as a request needs that room, the conversation that
was used least recently goes. Knows no requests and no text, only token ids. Used by the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.backbone.kv_cache import KVCache, SequenceKV

Key = tuple[bytes, str]  # client, its name for the conversation


@dataclass(frozen=True)
class _Kept:
    tokens: list[int]  # of the filled part, one for each
    kv: SequenceKV


class PrefixCache:
    """The kept sequences of all clients, the least recently used first."""

    def __init__(self, kv: KVCache) -> None:
        self.tokens = 0  # room that could be had by forgetting all of them
        self._kv = kv
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, tokens: Sequence[int], kv: SequenceKV) -> None:
        """Keep a sequence whose filled part holds the first `kv.length` of `tokens`, in place of what was
        kept under this key."""
        self._drop(key)
        self._kept[key] = _Kept(list(tokens[: kv.length]), kv)
        self.tokens += kv.capacity

    def take(self, key: Key, prompt: Sequence[int]) -> SequenceKV | None:
        """What was kept under this key, cut to what it has in common with the beginning of `prompt` (all but
        the last token at most: that one's logits are wanted); None where that is nothing."""
        kept = self._remove(key)
        if kept is None:
            return None
        common = common_prefix(kept.tokens, prompt[:-1])
        if common == 0:
            self._kv.release(kept.kv)
            return None
        kept.kv.truncate(common)
        return kept.kv

    def make_room(self, tokens: int) -> bool:
        """Have this much free in the KV cache, by forgetting conversations if need be, and none where that
        would not do. False where it does not fit beside what is being served."""
        if tokens > self._kv.free + self.tokens:
            return False
        while tokens > self._kv.free:
            self._drop(next(iter(self._kept)))
        return True

    def forget(self, client: bytes) -> None:
        """A client is gone, and its conversations with it."""
        for key in [key for key in self._kept if key[0] == client]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        kept = self._remove(key)
        if kept is not None:
            self._kv.release(kept.kv)

    def _remove(self, key: Key) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.tokens -= kept.kv.capacity
        return kept


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
