"""A tree of token sequences whose KV is in blocks: finds the longest computed prefix of a prompt.

A node is one block of an account's tokens behind those of its parents. Inner nodes are whole blocks; a leaf
may be a last, partly filled one. The tree holds a reference of each block. A sequence that runs holds those
of its path too, and what it holds is not evicted; of the rest, the least recently used goes first, leaves
before their parents. Models with recurrent states continue only where those are known: at nodes with a
snapshot.

Handles token ids and block numbers, no requests and no tensors. Used by the engine's thread alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.backbone.kv_blocks import BlockPool, Blocks
from pipeline.config import KV_BLOCK

Tokens = NDArray[np.int32]
Account = tuple[bytes, bool]  # whose tokens: a client, and which of the two rotary embeddings they have
States = TypeVar("States")


@dataclass(eq=False, slots=True)
class Node:
    """`tokens`: of this block; `children`: by their tokens' bytes. The root of an account has no block."""

    tokens: Tokens
    block: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """A computed prefix of a prompt, of `length` tokens: whole blocks, and the first tokens of `tail`.
    `common`: tokens of all whole blocks that the tree has of the prompt, more than can be used where
    snapshots are missing."""

    nodes: list[Node]
    tail: Node | None
    length: int
    common: int
    count: int  # of the tail's tokens

    @property
    def path(self) -> list[Node]:
        """Its nodes, each the parent of the next one."""
        return self.nodes if self.tail is None else [*self.nodes, self.tail]

    @property
    def without_tail(self) -> Match:
        return Match(self.nodes, None, self.length - self.count, self.common, 0)


NOTHING = Match([], None, 0, 0, 0)


class PrefixTree(Generic[States]):
    """The computed prefixes of all accounts."""

    def __init__(self, pool: BlockPool, snapshots: float | None = None, size: int = KV_BLOCK) -> None:
        """`snapshots`: of states, at most; None where the model is not recurrent. `size`: tokens of a
        block."""
        self.evicted = 0  # blocks
        self.snapshots: OrderedDict[Node, States] = OrderedDict()  # least recently used first
        self._most = snapshots
        self._pool = pool
        self._size = size
        self._roots: dict[Account, Node] = {}
        # Least recently used first, children before their parents.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._held = np.zeros(len(pool.references), np.bool_)  # which blocks the tree holds

    def __len__(self) -> int:
        return len(self._order)

    @property
    def evictable(self) -> int:
        """Blocks that only the tree holds."""
        return int(np.count_nonzero(self._held & (self._pool.references == 1)))

    @property
    def shared(self) -> int:
        """Blocks that more than one sequence holds."""
        return int(np.count_nonzero(self._pool.references - self._held > 1))

    def find(self, account: Account, prompt: Tokens) -> Match:
        """Returns the longest prefix of the prompt that a sequence can begin with."""
        nodes: list[Node] = []
        node = self._roots.get(account)
        while node is not None:
            start = len(nodes) * self._size
            child = node.children.get(prompt[start : start + self._size].tobytes())
            if child is None or len(child.tokens) < self._size:
                break
            node = child
            nodes.append(node)
        common = len(nodes) * self._size
        tail, count = self._tail(node, prompt[common:])
        while self._most is not None and tail is None and nodes and nodes[-1] not in self.snapshots:
            node = nodes.pop().parent
            tail, count = self._tail(node, prompt[len(nodes) * self._size :])
        return Match(nodes, tail, len(nodes) * self._size + count, common, count)

    def _tail(self, node: Node | None, rest: Tokens) -> tuple[Node | None, int]:
        """Returns the child that shares the most tokens with `rest`, and their number; of a recurrent model
        one with a snapshot, all of whose tokens are shared."""
        best, most = None, 0
        for child in () if node is None or not len(rest) else node.children.values():
            if child.tokens[0] == rest[0]:
                count = common_prefix(child.tokens, rest)
                usable = self._most is None or (count == len(child.tokens) and child in self.snapshots)
                if usable and count > most:
                    best, most = child, count
        return best, most

    def insert(
        self, account: Account, tokens: Tokens, blocks: Blocks, *, partial: bool = False
    ) -> Node | None:
        """Add a sequence's tokens and hold their blocks, the last one only if it is full or `partial`. Where
        the tree has another block of the same tokens, that replaces the sequence's in `blocks`. Returns the
        last node."""
        path = [self._roots.setdefault(account, Node(tokens[:0], -1, None))]
        end = len(tokens) if partial else len(tokens) // self._size * self._size
        for number, start in enumerate(range(0, end, self._size)):
            part = tokens[start : start + self._size]
            child = self._child(path[-1], part)
            if child is None:
                child = self._add(path[-1], part.copy(), blocks[number : number + 1])
            elif child.block != blocks[number] and len(part) == self._size:
                self._pool.drop(blocks[number : number + 1])
                blocks[number] = child.block
                self._pool.hold(blocks[number : number + 1])
            path.append(child)
        self.touch(path[1:])
        return path[-1] if len(path) > 1 else None

    def _child(self, parent: Node, part: Tokens) -> Node | None:
        """Returns the child that has these tokens; as the last part of a sequence also one that begins with
        them."""
        child = parent.children.get(part.tobytes())
        if child is None and len(part) < self._size and self._most is None:
            return next((c for c in parent.children.values() if _begins(c.tokens, part)), None)
        return child

    def _add(self, parent: Node, part: Tokens, block: Blocks) -> Node:
        node = parent.children[part.tobytes()] = Node(part, int(block[0]), parent)
        self._pool.hold(block)
        self._held[block] = True
        self._order[node] = None
        if self._most is None:
            for other in [c for c in parent.children.values() if c is not node and _begins(part, c.tokens)]:
                self._remove(other)
        return node

    def touch(self, path: Sequence[Node]) -> None:
        """Count these nodes, each the parent of the next one, as used now, and the last one's snapshot."""
        for node in reversed(path):
            self._order.move_to_end(node)
        if path and path[-1] in self.snapshots:
            self.snapshots.move_to_end(path[-1])

    def wants_states(self, node: Node) -> bool:
        """Whether to keep a snapshot at the end of a node's tokens: there is none. Then the least recently
        used one is dropped where there are as many as may be."""
        if not self._most or node in self.snapshots:
            return False
        if len(self.snapshots) >= self._most:
            self.snapshots.popitem(last=False)
        return True

    def evict(self, count: int) -> None:
        """Free `count` of the `evictable` blocks, or all where they are fewer."""
        left = count
        for node in list(self._order) if count > 0 else ():
            if not node.children and self._pool.references[node.block] == 1:
                self._remove(node)
                self.evicted += 1
                left -= 1
                if not left:
                    return

    def discard(self, account: Account, tokens: Tokens, begun: int) -> None:
        """Remove the first block of these tokens, of which the first `begun` are from others; where these are
        fewer than a block, all first blocks that begin with them; and what is behind."""
        shared = min(begun, self._size) or self._size
        root = self._roots.get(account)
        for child in [] if root is None else list(root.children.values()):
            if common_prefix(child.tokens, tokens) >= shared:
                self._remove_all(child)

    def forget(self, client: bytes | None = None) -> None:
        """Remove all of a client, or of all."""
        for account in [account for account in self._roots if client in (None, account[0])]:
            for child in list(self._roots.pop(account).children.values()):
                self._remove_all(child)

    def _remove_all(self, top: Node) -> None:
        for node in reversed(list(_below(top))):
            self._remove(node)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens.tobytes()]
        del self._order[node]
        self.snapshots.pop(node, None)
        self._held[node.block] = False
        self._pool.drop(np.array([node.block], np.int32))


def _below(top: Node) -> Iterator[Node]:
    """Yields a node and all behind it, parents before their children."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _begins(tokens: Tokens, part: Tokens) -> bool:
    return common_prefix(tokens, part) == len(part)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Returns the number of equal leading tokens."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
