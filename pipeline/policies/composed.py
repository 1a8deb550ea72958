"""Policies made of five parts: placement, gate, prediction, assignment and replacement.

The composed policy calls each part in turn (`parts.py`) and keeps the counts. It divides
the capacity, in tiles: some are the *reserve* of the prediction, the rest is the *cache* of the replacement,
which the placement fills at the start. A cached expert keeps its leading tiles, all of them or as many as its
layer's `Room.kept`. The reserve holds the other tiles of a predicted expert. When its layer is
planned, they are released at once where the device does not need the expert, and otherwise once the layer has
been computed; the replacement may take leading tiles of it into the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from pipeline.arrays import IntArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.parts import (
    STAY,
    Expert,
    Moves,
    Parts,
    Room,
    cacheable,
    require_calibration,
    whole_experts,
)
from pipeline.policies.view import Ahead, Gated, Plan, Policy, Routing, Signals, Target, View


class Reserve:
    """Room for predicted experts: while a layer is computed with its own, those of later ones are fetched. Of
    an expert that the cache keeps in part, the reserve holds the other tiles."""

    def __init__(self, wanted: int, whole: int, tiles: int) -> None:
        """Room for `wanted` experts of `tiles` tiles, but at most for half of the `whole` experts that the
        cache holds."""
        self.size = min(wanted, whole // 2)  # experts without a cached tile
        self.tiles = self.size * tiles
        self.note = ""  # what does not fit
        if self.size < wanted:
            self.note = (
                f"predicted experts have half of the cache, room for {self.size} instead of {wanted}, so not"
                " all of them are prefetched"
            )
        self._free = self.tiles
        self._held: dict[int, dict[int, int]] = {}  # tiles, by layer and expert

    def take(self, wanted: Iterable[tuple[Expert, int]]) -> list[Expert]:
        """Hold so many tiles of these experts, as far as there is room for all of an expert's, and return
        them."""
        taken = []
        for key, tiles in wanted:
            if tiles > self._free:
                break
            self._free -= tiles
            self._held.setdefault(key[0], {})[key[1]] = tiles
            taken.append(key)
        return taken

    def holds(self, layer: int) -> bool:
        """True where a tile of this layer is held."""
        return bool(self._held.get(layer))

    def give(self, expert: Expert, tiles: int) -> bool:
        """Hold so many tiles less of this expert; False where none of it is held."""
        layer, index = expert
        held = self._held.get(layer)
        if not held or index not in held:
            return False
        given = min(tiles, held[index])
        self._free += given
        held[index] -= given
        if not held[index]:
            del held[index]
        return True

    def release(self, layer: int, needed: Collection[int] = ()) -> list[tuple[Expert, int]]:
        """Hold no expert of a layer any longer but these; the others in ascending order, with the tiles that
        were held."""
        held = self._held.get(layer)
        if not held:
            return []
        released = sorted(held.keys() - set(needed))
        freed = [((layer, expert), held.pop(expert)) for expert in released]
        self._free += sum(tiles for _, tiles in freed)
        return freed


class Composed(Policy):
    """A policy made of five parts."""

    def __init__(self, name: str, parts: Parts) -> None:
        self.name = name
        self.parts = parts
        self.exact, self.by_row = parts.gate.exact, parts.gate.by_row
        self.needs_costs = any(part.needs_costs for part in parts)
        self.needs_calibration = any(part.needs_calibration for part in parts)
        self.keeps_heat = any(part.keeps_heat for part in parts)
        self.settles = parts.replacement.settles
        self.uses_device = parts.assignment.uses_device
        self.uses_host = parts.assignment.uses_host
        self.pauses = parts.prediction.pauses
        self._predicts = False
        self._reserve = Reserve(0, 0, 1)
        self._room = Room(0, ())
        for part in parts:
            part.join(parts)

    def notes(self, view: View) -> tuple[str, ...]:
        if not self.uses_device:
            return ()
        notes = [f"{self.name}: {note}" for part in self.parts for note in part.notes(view)]
        predicts, reserve = self.parts.prediction, self._reserve_in(view)
        if predicts.reserve(view) and not reserve.size:
            notes.append(
                f"{self.name}: prediction={predicts.name} is off: half of the cache is less than an expert"
            )
        elif reserve.size and self.parts.replacement.admits:
            sizes = self.parts.replacement.room(view, cacheable(view)).sizes or ()
            if empty := sum(not size for size in sizes):
                notes.append(f"{self.name}: {empty} of {len(sizes)} layers have no cache to prefetch into")
        elif predicts.names_channels and self.sparsity.dense:
            notes.append(f"{self.name}: prediction={predicts.name} is off: no channel is left out")
        elif reserve.note:
            notes.append(f"{self.name}: {reserve.note}")
        return tuple(dict.fromkeys(notes))

    def check_calibration(self, calibration: Calibration | None) -> None:
        super().check_calibration(calibration)
        require_calibration(self.name, self.parts, calibration)

    def placement(self, view: View) -> IntArray:
        self._reserve = self._reserve_in(view)
        self._predicts = self._reserve.size > 0
        if self.parts.replacement.admits:
            self._reserve = Reserve(0, 0, 1)
        self._room = room = self.parts.replacement.room(view, cacheable(view) - self._reserve.tiles)
        chosen = self.parts.placement.chosen(view, room)
        if room.sizes is not None:
            for layer, size in enumerate(room.sizes):
                placed = np.flatnonzero(chosen[layer])
                if len(placed) > size:  # a layer's most popular experts stay, of equal ones the first
                    order = np.argsort(-view.popularity[layer, placed], kind="stable")
                    chosen[layer, placed[order[size:]]] = False
        self.parts.replacement.start(
            list(zip(*(axis.tolist() for axis in np.nonzero(chosen)), strict=True)), room, view
        )
        return np.where(chosen, np.array(room.kept, np.int32)[:, None], 0).astype(np.int32)

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        if not view.prefetching or not (self._predicts or self._names_channels(view)):
            return ()
        return () if self.parts.prediction.before else self.parts.prediction.probes(layer, view)

    def probes_before(self, layer: int, view: View) -> tuple[int, ...]:
        if not (view.prefetching and self._predicts and self.parts.prediction.before):
            return ()
        return self.parts.prediction.probes(layer, view)

    def _names_channels(self, view: View) -> bool:
        """True where the prediction names channels in this step."""
        masked = not self.sparsity.dense and view.phase == "decode"
        return masked and self.parts.prediction.names_channels

    def channels_ahead(self, layer: int, signals: Signals, view: View) -> Routing | None:
        if not (view.prefetching and self._names_channels(view)):
            return None
        routing = self.parts.prediction.routing(layer, signals, view)
        return None if routing is None else self.parts.gate.apply_gate(layer + 1, routing, view)

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        self.parts.replacement.observe(layer, signals, view)
        return self.parts.gate(layer, signals, view)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        cut = self.parts.assignment.cut(layer, routing, view)
        if not self.uses_device:
            return Plan(cut)
        active = routing.active
        targets = self._targets(self.parts.replacement.plan(layer, active, cut, view), view)
        if self._reserve.holds(layer):
            unneeded = self._reserve.release(layer, active.experts[cut[active.experts] > 0].tolist())
            targets = *self._cached(unneeded, view), *targets
        return Plan(cut, targets)

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        self.no_room = 0
        if not (self._predicts and view.prefetching) or self.parts.prediction.before:
            return ()
        return self._predicted(layer, signals, view)

    def predict_before(self, layer: int, signals: Signals, view: View) -> tuple[Target, ...]:
        return self._predicted(layer, signals, view)

    def _predicted(self, layer: int, signals: Signals, view: View) -> tuple[Target, ...]:
        self.no_room = 0
        wanted = self.parts.prediction.experts(
            layer, signals, view, lambda of, routing: self.parts.gate.apply_gate(of, routing, view)
        )
        if self.parts.replacement.admits:  # into later layers: this one is being computed
            wanted = [key for key in wanted if key[0] != layer]
            targets = self._targets(self.parts.replacement.admit(wanted), view)
        else:
            tiles = view.shape.tiles
            missing = ((key, tiles - int(view.target[key])) for key in wanted)
            targets = tuple(Target(*key, tiles) for key in self._reserve.take(missing))
        self.no_room = len(wanted) - sum(target.tiles > 0 for target in targets)
        return targets

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        if not self.uses_device:
            return ()
        targets = self._targets(self.parts.replacement.after(layer, routing.active, view), view)
        return *self._cached(self._reserve.release(layer), view), *targets

    def rest(self, view: View) -> tuple[Target, ...]:
        room = self.parts.replacement.rest(view) if self.uses_device else None
        if room is None:
            return ()
        self._room = room
        wanted = np.zeros_like(view.target)
        for layer, kept in enumerate(room.kept):
            self._reserve.release(layer)
            wanted[layer, list(self.parts.replacement.held(layer))] = kept
        changed = np.argwhere(wanted != view.target).tolist()
        targets = [Target(layer, expert, int(wanted[layer, expert])) for layer, expert in changed]
        # those that shrink come first
        return tuple(sorted(targets, key=lambda target: target.tiles > view.target[target[:2]]))

    def _reserve_in(self, view: View) -> Reserve:
        whole = whole_experts(view.shape, view.capacity)
        return Reserve(self.parts.prediction.reserve(view), whole, view.shape.tiles)

    def _cached(self, released: Iterable[tuple[Expert, int]], view: View) -> Iterator[Target]:
        """Targets for the tiles that the cache keeps of experts that the reserve has released."""
        return (Target(*key, view.shape.tiles - held) for key, held in released)

    def _targets(self, moves: Moves, view: View) -> tuple[Target, ...]:
        """Shrinking targets come first: applied one by one they never exceed the capacity. An expert that the
        reserve holds has all its tiles as target already, and the reserve holds those beyond the kept
        ones."""
        if moves is STAY:
            return ()
        for key in moves.out:
            self._reserve.give(key, view.shape.tiles)
        kept = self._room.kept
        grown = [Target(*k, kept[k[0]]) for k in moves.into if not self._reserve.give(k, kept[k[0]])]
        return *(Target(*key, 0) for key in moves.out), *grown


class PreGated(Composed):
    """A composed policy in which in decode each layer's experts are those that its router names on the input
    of the layer before, and they enter the cache once that layer has been computed. The host's share of them
    begins in their own layer, from its own input: only the routing is early."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        self._next: tuple[Routing, IntArray] | None = None  # of the layer decided ahead, with its cuts

    @property
    def runs_all_routers(self) -> bool:
        return False

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        predicted = super().probes(layer, view)
        return tuple(dict.fromkeys((layer + 1, *predicted))) if self._decides(layer, view) else predicted

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        self._next = None
        if not self._decides(layer, view):
            return None
        assert view.router is not None
        routing = view.router(signals.probes[layer + 1], layer + 1)
        cut = self.parts.assignment.cut(layer + 1, routing, view)
        self._next = routing, cut
        return Ahead(Gated(routing, routing, predicted=True), cut, early=False)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        targets = super().after(layer, routing, view)
        if self._next is None or not self.uses_device:
            return targets
        decided, cut = self._next  # its `plan` is not called
        moves = self.parts.replacement.plan(layer + 1, decided.active, cut, view)
        return *targets, *self._targets(moves, view)

    def _decides(self, layer: int, view: View) -> bool:
        return view.phase == "decode" and layer + 1 < view.shape.layers
