"""Rotary position embedding: tables of cosines and sines, and the rotation.

Frequencies of the default kind are computed here; those of every other kind come from transformers'
initialisers and its reading of the config.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.device import Device
from pipeline.errors import ModelError
from pipeline.models.config_keys import Config, for_transformers
from pipeline.models.registry import architecture_of
from pipeline.models.spec import Rope
from pipeline.models.transformers_log import to_own_log


class RopeTables:
    """Cosines and sines of every position, for short sequences and, with a switch (see Rope), long ones."""

    def __init__(self, rope: Rope, config: Config, width: int, context: int, device: Device) -> None:
        """`width`: numbers of a head that are rotated. Raises ModelError for parameters without sense."""
        lengths = [False, True] if rope.switch is not None and context > rope.switch else [False]
        tables = [_table(rope, config, width, context, long) for long in lengths]
        self._context = context
        # [context, 1, width], followed by as many rows for long sequences
        self._upload = device.from_host
        self._cos = torch.cat([cos for cos, _ in tables]).to(device.torch_device)[:, None]
        self._sin = torch.cat([sin for _, sin in tables]).to(device.torch_device)[:, None]

    def rows(self, positions: Sequence[tuple[range, bool]]) -> list[int]:
        """Row numbers of ranges of positions, each with whether its sequence is long: [R]."""
        return [p + self._context * long for span, long in positions for p in span]

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, width]; the sines of the first half are negated."""
        return self.at(self._upload(np.array(rows, np.int64)))

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of rows of the tables; the rows are on the device, int64 [R]."""
        return self._cos[rows], self._sin[rows]

    def addresses(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """The same rows where they lie, on the host: of cosines and sines, [R] each. Raises IndexError
        outside the tables, because C reads what the addresses name."""
        if not 0 <= min(rows, default=0) <= max(rows, default=0) < len(self._cos):
            raise IndexError(f"rotary rows {min(rows)} to {max(rows)} of {len(self._cos)}")
        step = self._cos.stride(0) * self._cos.element_size()
        cosines, sines = self._cos.data_ptr(), self._sin.data_ptr()
        return [cosines + step * row for row in rows], [sines + step * row for row in rows]


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """x float32 [R, heads, width] by `RopeTables`' factors: numbers i and i + rotated / 2 are a pair. The
    factors may be of the first numbers only; the others stay."""
    cos, sin = cos_sin
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos_sin), x[..., rotated:]), dim=-1)
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin


def _table(rope: Rope, config: Config, width: int, context: int, long: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, width]."""
    frequencies, scale = _frequencies(rope, config, width, long and rope.scales is None)
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
    """The frequency of each pair of numbers [width / 2], and the scale of cosines and sines."""
    if rope.kind == "default":
        return rope.theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    to_own_log()
    architecture = architecture_of(config)
    name = architecture.known_as or architecture.model_type
    length = rope.switch + 1 if long and rope.switch is not None else None
    try:
        parsed = CONFIG_MAPPING[name].from_dict(for_transformers(config))
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](parsed, torch.device("cpu"), length)
        scale = float(scale)
    except Exception as e:  # transformers raises many types for wrong values
        words = " ".join(str(e).split())
        raise ModelError(f"config.json: RoPE of type {rope.kind!r}: {type(e).__name__}: {words}") from None
    return frequencies.float(), scale
