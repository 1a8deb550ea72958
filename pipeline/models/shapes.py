"""Shapes of models, for `--model shape:NAME[/LAYERS]`: a config.json without weights, so that a model's speed
can be measured before it is downloaded (`pipeline/checkpoint/random_model.py`). NAME is one of well-known
models, or a config.json: `shape:PATH/config.json[/LAYERS]`. To add a name, add its config to
`pipeline/assets/shapes.json`, with the keys that its family reads. That of phi-3.5-moe lacks the factors of
its rotary embedding, which do not change its speed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pipeline import assets
from pipeline.errors import ModelError
from pipeline.models.config_keys import Config
from protocol.files import read_json

PREFIX = "shape:"
GGUF = ".gguf"
# Beginnings of the names of files beside a model: projectors of pictures, statistics, and layers
# that predict further tokens.
OTHER_GGUF = ("mmproj", "imatrix", "mtp-")
LAYERS = "num_hidden_layers"
TEXT = "text_config"  # of a model that also sees or hears
QUANTIZED = "quantization_config"  # says how weights are stored, and there are none
SHAPES: dict[str, dict[str, Any]] = json.loads((Path(assets.__file__).parent / "shapes.json").read_text())


def is_shape(model: str | Path) -> bool:
    """Returns whether `--model` names a shape instead of a folder."""
    return str(model).startswith(PREFIX)


def is_gguf(model: str | Path) -> bool:
    """Returns whether `--model` names a GGUF file, or the first of its parts, instead of a folder."""
    return str(model).lower().endswith(GGUF) and not is_shape(model)


def short_name(model: str | Path) -> str:
    """A model's name in lists: of a folder its last component, of a shape the whole name, and of a folder in
    the Hugging Face cache (models--ORG--NAME/snapshots/COMMIT) ORG/NAME."""
    if is_shape(model):
        return str(model)
    path = Path(model)
    kind, *name = path.parent.parent.name.split("--")
    if kind == "models" and name and path.parent.name == "snapshots":
        return "/".join(name)
    return path.name


def with_whole_path(model: str) -> str:
    """A shape's name that means the same in every process."""
    name = model.removeprefix(PREFIX)
    return PREFIX + str(Path(name).absolute()) if _FILE.fullmatch(name) else model


def shape_config(model: str) -> tuple[str, Config]:
    """What the weights of a shape depend on, and its config, from shape:NAME or shape:NAME/N (its first N
    layers). Raises ModelError, one line."""
    name, slash, layers = _parts(model)
    if name in SHAPES:
        seed, config = name, SHAPES[name]
    elif name.endswith(".json"):
        config = {key: value for key, value in _read(Path(name)).items() if key != QUANTIZED}
        seed = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()
    else:
        known = ", ".join(SHAPES)
        raise ModelError(f"{model}: unknown shape {name!r} (supported: {known}, and PATH/config.json)")
    if not slash:
        return seed, config
    most = config.get(TEXT, config).get(LAYERS)
    if not isinstance(most, int):
        raise ModelError(f"{model}: {name} gives no {LAYERS}, so no first layers can be taken; leave out /N")
    if not re.fullmatch("[1-9][0-9]{0,8}", layers) or int(layers) > most:
        raise ModelError(f"{model}: write it as {PREFIX}{name}/N, with N layers from 1 to {most}")
    return seed, _first_layers(config, int(layers), most)


_FILE = re.compile(r"(.*\.json)(?:/([^/]*))?")


def _parts(model: str) -> tuple[str, str, str]:
    """Name or path, "/" where a number of layers follows, and the number."""
    name = model.removeprefix(PREFIX)
    if (file := _FILE.fullmatch(name)) is None:
        return name.partition("/")
    return file[1], "" if file[2] is None else "/", file[2] or ""


def _read(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is damaged: it is not valid JSON") from None
    if not isinstance(config, dict) or not isinstance(config.get(TEXT, {}), dict):
        raise ModelError(f"{path} is no model's config: it is not a JSON object, or its {TEXT} is none")
    return config


def _first_layers(config: Config, layers: int, most: int) -> dict[str, Any]:
    """The config with fewer layers: lists with an entry for each are cut."""
    if TEXT in config:
        return {**config, TEXT: _first_layers(config[TEXT], layers, most)}
    cut = {k: v[:layers] if isinstance(v, list) and len(v) == most else v for k, v in config.items()}
    return cut | {LAYERS: layers}
