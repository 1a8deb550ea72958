"""Rotary position embedding: the tables of cosines and sines, and the rotation.

The frequencies of every kind but the plain one are transformers' own: they are computed by its initialisers
from its reading of the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from pipeline.backbone.disk_cache import BackboneCache
from pipeline.errors import ModelError
from pipeline.models.config_keys import Config
from pipeline.models.spec import Rope


class RopeTables:
    """Of all positions of a context, for short sequences and for those beyond the switch."""

    def __init__(
        self,
        rope: Rope,
        config: Config,
        width: int,
        context: int,
        device: torch.device,
        cache: BackboneCache | None,
    ) -> None:
        """`width`: numbers of a head that are rotated; `cache`: where frequencies are kept between starts,
        for their library takes longer to import than a kept backbone to read. Raises ModelError where
        parameters make no sense."""
        both = [False, True] if rope.switch is not None and context > rope.switch else [False]
        found = [_kept(rope, config, width, long, cache) for long in both]
        tables = [_angles(rope, one, width, context, long) for one, long in zip(found, both, strict=True)]
        self._context = context
        # [context or twice it, 1, width]
        self._cos = torch.cat([cos for cos, _ in tables]).to(device)[:, None]
        self._sin = torch.cat([sin for _, sin in tables]).to(device)[:, None]

    def rows(self, places: Sequence[tuple[range, bool]]) -> Tensor:
        """Where the tables have the rows of these positions, each range with whether its sequence is beyond
        the switch: int64 [R]."""
        return torch.tensor([p + self._context * long for positions, long in places for p in positions])

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, width]; the sines carry the signs of the halves."""
        return self._cos[rows], self._sin[rows]


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x float32 [R, heads, width], by cosines and sines of `RopeTables`: number i turns with number
    i + width / 2."""
    cos, sin = turn
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin


def _kept(
    rope: Rope, config: Config, width: int, long: bool, cache: BackboneCache | None
) -> tuple[Tensor, float]:
    """`_frequencies`, from the cache where they are there."""
    long = long and rope.scales is None
    if rope.kind == "default" or cache is None:
        return _frequencies(rope, config, width, long)
    name = f"rope {'long' if long else 'short'}"
    data = cache.take(name, torch.float32.itemsize * (width // 2 + 1))
    if data is None:
        frequencies, scale = _frequencies(rope, config, width, long)
        cache.keep(name, torch.cat((frequencies, torch.tensor([scale]))).numpy().view(np.uint8))
        return frequencies, scale
    numbers = torch.from_numpy(data.view(np.float32).copy())
    return numbers[:-1], float(numbers[-1])


def _angles(
    rope: Rope, found: tuple[Tensor, float], width: int, context: int, long: bool
) -> tuple[Tensor, Tensor]:
    frequencies, scale = found
    if rope.scales is not None:
        scale = rope.scales[long]
    if len(frequencies) != width // 2:
        raise ModelError(
            f"config.json: RoPE has {len(frequencies)} factors for {width // 2} pairs of numbers"
        )
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies  # [context, width / 2]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def _frequencies(rope: Rope, config: Config, width: int, long: bool) -> tuple[Tensor, float]:
    """Of each pair of numbers [width / 2], and the scale of cosines and sines."""
    if rope.kind == "default":
        return rope.theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    length = rope.switch + 1 if long and rope.switch is not None else None
    try:
        # A copy to its depths: their class writes into what it is given.
        theirs = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"), length)
        scale = float(scale)
    except Exception as e:  # whatever a wrong value leads to in there
        words = " ".join(str(e).split())
        raise ModelError(f"config.json: RoPE of type {rope.kind!r}: {type(e).__name__}: {words}") from None
    return frequencies.float(), scale
