"""PrefixTree against a plain dictionary of all kept prefixes, which searches them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.backbone.kv_blocks import BlockPool
from pipeline.config import KV_BLOCK
from pipeline.scheduling.prefix_tree import Account, Match, PrefixTree

SIZE = 3  # tokens of a block
BLOCKS = 24
SNAPSHOTS = 4
Prefix = tuple[Account, tuple[int, ...]]


@dataclass
class Running:
    """A sequence that runs; its first `published` blocks are the tree's."""

    account: Account
    tokens: list[int]
    blocks: list[int]
    begun: int
    published: int


class Machine:
    """A tree, running sequences, and the model: all kept prefixes with the time of their last use."""

    def __init__(self, recurrent: bool) -> None:
        self.recurrent = recurrent
        self.pool = BlockPool((), torch.float32, torch.device("cpu"), KV_BLOCK * BLOCKS)
        self.content: dict[
            int, tuple[int, ...]
        ] = {}  # of each block, all of its sequence up to its last token
        self.tree: PrefixTree[Prefix] = PrefixTree(self.pool, SNAPSHOTS if recurrent else None, SIZE)
        self.running: list[Running] = []
        self.kept: dict[Prefix, int] = {}
        self.snapshots: list[Prefix] = []  # least recently used first
        self.now = 0

    # --- operations ---------------------------------------------------------------------------------------

    def begin(self, account: Account, prompt: list[int]) -> None:
        match = self.tree.find(account, np.array(prompt, np.int32))
        assert match.length == self.reachable(account, prompt)
        self._check_content(match, prompt)
        self.tree.touch(match.path)
        self._use([(account, tuple(prompt[: SIZE * n])) for n in range(1, len(match.nodes) + 1)])
        if match.tail:
            self._use([(account, (*prompt[: SIZE * len(match.nodes)], *match.tail.tokens.tolist()))])
        if match.length and self.recurrent:
            begun = account, tuple(prompt[: match.length])
            assert self.tree.snapshots[match.path[-1]] == begun
            self.snapshots.append(self.snapshots.pop(self.snapshots.index(begun)))
        blocks = [node.block for node in match.nodes]
        self.pool.hold(np.array(blocks, np.int32))
        sequence = Running(account, prompt[: SIZE * len(blocks)], blocks, match.length, len(blocks))
        self.running.append(sequence)
        self.extend(sequence, prompt[len(sequence.tokens) : match.length])  # the tail, copied

    def extend(self, sequence: Running, tokens: list[int]) -> None:
        for token in tokens:
            if len(sequence.tokens) == SIZE * len(sequence.blocks):
                self.evict(1 - self.pool.free)
                if not self.pool.free:
                    return
                sequence.blocks.append(int(self.pool.take(1)[0]))
            assert self.pool.references[sequence.blocks[-1]] == 1  # none that is shared is written
            sequence.tokens.append(token)
            self.content[sequence.blocks[-1]] = tuple(sequence.tokens)

    def publish(self, sequence: Running, partial: bool = False) -> None:
        tokens, blocks = np.array(sequence.tokens, np.int32), np.array(sequence.blocks, np.int32)
        last = self.tree.insert(sequence.account, tokens, blocks, partial=partial)
        sequence.blocks = blocks.tolist()
        whole = len(sequence.tokens) // SIZE
        sequence.published = whole
        for other in self.running:  # one that began with them may go on with blocks that were removed since
            while other.published < whole and self._share(other, sequence, other.published + 1):
                other.published += 1
        ends = [SIZE * n for n in range(1, whole + 1)]
        if partial and len(sequence.tokens) % SIZE:
            ends.append(len(sequence.tokens))
        used = [(sequence.account, tuple(sequence.tokens[:end])) for end in ends]
        if not self.recurrent:
            if used and len(used[-1][1]) % SIZE and used[-1] not in self.kept:
                used[-1] = next((p for p in self.kept if self._covers(p, used[-1])), used[-1])
            for prefix in used:
                for other in [p for p in self.kept if self._covers(prefix, p)]:
                    del self.kept[other]
        self._use(used)
        if last is not None and self.recurrent:
            if self.tree.wants_states(last):
                self.tree.snapshots[last] = used[-1]
            others = [prefix for prefix in self.snapshots if prefix != used[-1]]
            self.snapshots = [*others[1 - SNAPSHOTS :], used[-1]]

    def end(self, sequence: Running, keep: bool) -> None:
        if keep:
            self.publish(sequence, partial=True)
        self.running.remove(sequence)
        self.pool.drop(np.array(sequence.blocks, np.int32))

    def fail(self, sequence: Running) -> None:
        tokens = np.array(sequence.tokens, np.int32)
        self.tree.discard(sequence.account, tokens, sequence.begun)
        shared = min(sequence.begun, SIZE) or SIZE
        self._forget(
            [
                prefix
                for prefix in self.kept
                if prefix[0] == sequence.account and _common(prefix[1][:SIZE], sequence.tokens) >= shared
            ]
        )
        self.end(sequence, keep=False)

    def forget(self, client: bytes) -> None:
        for sequence in [s for s in self.running if s.account[0] == client]:
            self.end(sequence, keep=True)
        self.tree.forget(client)
        self._forget([p for p in self.kept if p[0][0] == client])

    def evict(self, count: int) -> None:
        self.tree.evict(count)
        for _ in range(count):
            leaves = [
                p for p in self.kept if not self._held(p) and not any(_extends(q, p) for q in self.kept)
            ]
            if leaves:
                self._forget([min(leaves, key=lambda prefix: self.kept[prefix])])

    # --- the model ----------------------------------------------------------------------------------------

    def reachable(self, account: Account, prompt: list[int]) -> int:
        """The longest prefix that can be gone on from, by looking at all."""
        if self.recurrent:
            known = [p for a, p in self.snapshots if a == account and tuple(prompt[: len(p)]) == p]
            return max(map(len, known), default=0)
        return max((_common(p, prompt) for a, p in self.kept if a == account), default=0)

    def _use(self, prefixes: list[Prefix]) -> None:
        self.now += 1
        self.kept |= dict.fromkeys(prefixes, self.now)

    def _forget(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            del self.kept[prefix]
            self.snapshots = [p for p in self.snapshots if p != prefix]
            for sequence in self.running if len(prefix[1]) % SIZE == 0 else ():
                if sequence.account == prefix[0] and tuple(sequence.tokens[: len(prefix[1])]) == prefix[1]:
                    sequence.published = min(sequence.published, len(prefix[1]) // SIZE - 1)

    @staticmethod
    def _share(one: Running, other: Running, blocks: int) -> bool:
        return len(one.blocks) >= blocks and one.blocks[:blocks] == other.blocks[:blocks]

    def _held(self, prefix: Prefix) -> bool:
        account, tokens = prefix
        return any(
            s.account == account and tuple(s.tokens[: len(tokens)]) == tokens
            for s in self.running
            if len(tokens) in range(0, SIZE * s.published + 1, SIZE)
        )

    def _covers(self, prefix: Prefix, part: Prefix) -> bool:
        """Whether `part` ends within the last block of `prefix`."""
        tokens, start = part[1], (len(part[1]) - 1) // SIZE
        inside = prefix[0] == part[0] and (len(prefix[1]) - 1) // SIZE == start
        return inside and len(tokens) < len(prefix[1]) and prefix[1][: len(tokens)] == tokens

    def _check_content(self, match: Match, prompt: list[int]) -> None:
        for number, node in enumerate(match.nodes, 1):
            assert self.content[node.block] == tuple(prompt[: SIZE * number])
        if match.tail:
            assert self.content[match.tail.block][: match.length] == tuple(prompt[: match.length])

    def check(self) -> None:
        """Counts are exact, and the tree has what the model has."""
        counts = np.zeros(BLOCKS, np.int32)
        for sequence in self.running:
            np.add.at(counts, sequence.blocks, 1)
        for node in self.tree._order:
            counts[node.block] += 1
        assert (counts == self.pool.references).all()
        assert len(self.tree) == len(self.kept) <= BLOCKS
        assert self.tree.evictable == sum(not self._held(p) for p in self.kept)
        assert list(self.tree.snapshots.values()) == self.snapshots


def _extends(longer: Prefix, prefix: Prefix) -> bool:
    return (
        longer != prefix
        and longer[0] == prefix[0]
        and longer[1][: len(prefix[1])] == prefix[1]
        and (len(prefix[1]) % SIZE == 0)
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


accounts = st.tuples(st.sampled_from([b"a", b"b"]), st.booleans())
texts = st.lists(st.integers(0, 1), max_size=11)
steps = st.tuples(st.integers(0, 19), accounts, texts)


@pytest.mark.parametrize("recurrent", [False, True])
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=100, max_size=100))
def test_random_operations_find_and_evict_as_a_dictionary_does(recurrent: bool, given) -> None:
    """10,000 operations in all. Counts are exact after each; nothing is left in the end."""
    machine = Machine(recurrent)
    for number, account, text in given:
        sequence = machine.running[number % len(machine.running)] if machine.running else None
        if number < 5 or sequence is None:
            machine.begin(account, text)
        elif number < 10:
            machine.extend(sequence, text)
        elif number < 13:
            machine.publish(sequence)
        elif number < 17:
            machine.end(sequence, keep=number < 16)
        elif number == 17:
            machine.fail(sequence)
        elif number == 18:
            machine.evict(len(text))
        elif len(text) > 9:
            machine.forget(account[0])
        machine.check()
    while machine.running:
        machine.end(machine.running[0], keep=True)
    machine.evict(BLOCKS)
    machine.check()
    assert (machine.pool.free, len(machine.tree), len(machine.tree.snapshots)) == (BLOCKS, 0, 0)
