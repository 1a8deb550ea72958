"""The header of a trace: the model, its experts and its router."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import TraceError
from pipeline.models.routing import Router, Softmax, SparseMixer
from pipeline.policies.view import ModelShape

MAGIC = b"TANDEMTR"
VERSION = 1
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the JSON object that follows
MAX_JSON = 1 << 16
MAX_DEPTH = 16
LARGEST = {"layers": 1 << 12, "experts": 1 << 16, "tiles": 1 << 20, "top_k": 1 << 12, "tile_bytes": 1 << 40}
ROUTERS: dict[str, type[Softmax] | type[SparseMixer]] = {"softmax": Softmax, "sparse-mixer": SparseMixer}
KINDS: dict[str, dict[str, type]] = {
    "softmax": {"k": int, "rescaled": bool, "scale": float, "groups": int, "best_groups": int},
    "sparse-mixer": {"jitter": float},
}


@dataclass(frozen=True)
class Header:
    """The traced model, and the settings of the trace."""

    model: str  # its path or name, for a person
    fingerprint: str  # of the model: the name of the folder of its calibration
    store: str  # fingerprint of its experts in their format and tile: the key of measured costs
    shape: ModelShape
    tile_bytes: int
    router: Router
    depth: int  # the routers of this many later layers were applied to each layer's x
    up: str = ""  # the format of the up matrices, where the experts' format keeps them apart
    up_bytes: int = 0  # of them for a tile, beside its `tile_bytes`

    def predictions(self, layer: int) -> int:
        """The later layers with recorded router logits on this layer's x."""
        return min(self.depth, self.shape.layers - 1 - layer)

    def encode(self) -> bytes:
        """The file's first bytes. Raises TraceError for a router that the format cannot describe."""
        kinds = [kind for kind, router in ROUTERS.items() if type(self.router) is router]
        if not kinds:
            raise TraceError(f"a trace cannot describe the router {type(self.router).__name__}")
        plain: dict[str, Any] = {"model": self.model, "fingerprint": self.fingerprint, "store": self.store}
        plain |= asdict(self.shape) | {"tile_bytes": self.tile_bytes, "depth": self.depth}
        if self.up:
            plain |= {"up": self.up, "up_bytes": self.up_bytes}
        plain["router"] = {"kind": kinds[0]} | {name: getattr(self.router, name) for name in KINDS[kinds[0]]}
        text = json.dumps(plain).encode()
        return PREFIX.pack(MAGIC, VERSION, len(text)) + text

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """The JSON object. Raises TraceError."""
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError):
            raise TraceError("its header is damaged") from None
        if not isinstance(plain, dict):
            raise TraceError("its header is damaged")
        sizes = {name: _whole(plain, name, 1, most) for name, most in LARGEST.items()}
        tile_bytes = sizes.pop("tile_bytes")
        shape = ModelShape(**sizes)
        if shape.top_k > shape.experts:
            raise TraceError(f"a token cannot use {shape.top_k} of {shape.experts} experts")
        return cls(
            model=_text(plain, "model"),
            fingerprint=_fingerprint(plain, "fingerprint"),
            store=_fingerprint(plain, "store"),
            shape=shape,
            tile_bytes=tile_bytes,
            router=_router(plain.get("router"), shape),
            depth=_whole(plain, "depth", 0, MAX_DEPTH),
            up=_text(plain, "up") if "up" in plain else "",
            up_bytes=_whole(plain, "up_bytes", 1, LARGEST["tile_bytes"]) if "up" in plain else 0,
        )


def _router(plain: Any, shape: ModelShape) -> Router:
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise TraceError("its header describes an unknown router")
    values: dict[str, Any] = {}
    for name, type_ in KINDS[kind].items():
        value = plain.get(name)
        if type(value) is not type_ and not (type_ is float and type(value) is int):
            raise TraceError(f"its header's router has no {name}")
        values[name] = value
    if kind == "sparse-mixer":
        fits = shape.top_k == 2 and 0 <= values["jitter"] < math.inf
    else:
        groups, best = values["groups"], values["best_groups"]
        fits = values["k"] == shape.top_k and math.isfinite(values["scale"]) and values["scale"] > 0
        fits = fits and 1 <= best <= groups <= shape.experts and shape.experts % groups == 0
    if not fits:
        raise TraceError("its header's router does not fit its shape")
    return ROUTERS[kind](**values)


def _whole(plain: dict[str, Any], name: str, least: int, most: int) -> int:
    value = plain.get(name)
    if type(value) is not int or not least <= value <= most:
        raise TraceError(f"its header's {name} is not a whole number from {least} to {most}")
    return value


def _fingerprint(plain: dict[str, Any], name: str) -> str:
    value = plain.get(name)
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8,128}", value):  # it names files
        raise TraceError(f"its header's {name} is not a fingerprint")
    return value


def _text(plain: dict[str, Any], name: str) -> str:
    value = plain.get(name)
    if not isinstance(value, str):
        raise TraceError(f"its header's {name} is not a text")
    return "".join(c if c.isprintable() else "?" for c in value)  # it is shown in a terminal
