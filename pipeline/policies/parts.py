"""Parts that several presets share: counting whole experts, choosing them, and going to new targets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.view import IntArray, ModelShape, Target, View


def whole_experts(shape: ModelShape, capacity: int) -> int:
    """How many whole experts a cache of `capacity` tiles holds."""
    return min(capacity // shape.tiles, shape.layers * shape.experts)


def experts_per_layer(shape: ModelShape, capacity: int) -> IntArray:
    """The same shared out over the layers, int32 [L]: evenly, what is left over to the first layers."""
    each, left = divmod(whole_experts(shape, capacity), shape.layers)
    share = np.full(shape.layers, each, dtype=np.int32)
    share[:left] += 1
    return share


def popular_placement(view: View) -> IntArray:
    """Targets [L, E], 0 or n: the same number of experts in every layer, the most popular ones; what is left
    over (fewer than L) goes to the next most popular anywhere. Ties go to the first layer and expert."""
    shape = view.shape
    each, left = divmod(whole_experts(shape, view.capacity), shape.layers)
    # a stable sort of the negated counts keeps equal ones in index order
    order = np.argsort(-view.popularity, axis=1, kind="stable")
    chosen = np.zeros((shape.layers, shape.experts), dtype=bool)
    np.put_along_axis(chosen, order[:, :each], True, axis=1)
    rest = np.flatnonzero(~chosen)
    by_count = np.argsort(-view.popularity.ravel()[rest], kind="stable")
    chosen.ravel()[rest[by_count[:left]]] = True
    return np.where(chosen, shape.tiles, 0).astype(np.int32)


def changes(now: NDArray[np.int32], wanted: NDArray[np.int32], first_layer: int) -> tuple[Target, ...]:
    """Targets that lead from `now` to `wanted`, both [layers, E] from `first_layer` on. Those that shrink
    come first, so that applying them one by one never exceeds the capacity that `wanted` keeps to."""
    layers, experts = np.nonzero(now != wanted)
    targets = [
        (int(wanted[layer, expert] > now[layer, expert]), int(layer), int(expert), int(wanted[layer, expert]))
        for layer, expert in zip(layers, experts, strict=True)
    ]
    return tuple(Target(first_layer + layer, expert, tiles) for _, layer, expert, tiles in sorted(targets))


def unused_tiles_note(name: str, view: View) -> tuple[str, ...]:
    """One line where a preset of whole experts must leave tiles of the cache empty."""
    shape = view.shape
    unused = view.capacity - whole_experts(shape, view.capacity) * shape.tiles
    if unused == 0 or view.capacity >= shape.layers * shape.experts * shape.tiles:
        return ()
    return (
        f"{name}: {unused} of the cache's {view.capacity} tiles stay empty, because it keeps whole experts "
        f"and an expert has {shape.tiles} tiles",
    )
