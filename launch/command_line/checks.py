"""Checks of the command line's values and files before any process is started."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from launch.errors import WrongUsage
from pipeline.assets import model_dir
from pipeline.calibration.file import calibration_path, read
from pipeline.checkpoint.index import read_fields
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from pipeline.memory.plan import AUTOMATIC
from pipeline.models.facts import expert_shape, facts_of
from pipeline.models.shapes import is_gguf, is_shape, shape_config
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.text.generation_defaults import sampling_defaults
from pipeline.text.tokenizer import TOKENIZER_FILES, eos_ids, has_chat_template, has_tokenizer
from protocol.codec import encode
from protocol.errors import MalformedMessage, ProtocolError
from protocol.files import read_small
from protocol.program import user_folder
from shm.atomic_file import check_creatable
from shm.layout import format_named

T = TypeVar("T")
Record = TypeVar("Record", bound=msgspec.Struct)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

NO_TOKENIZER = "this model has no tokenizer, so it reads no text and cannot chat"
IDS = "`generate --prompt-tokens`"  # what runs such a model all the same
NO_TEMPLATE = "this model has no chat template, so it cannot chat: `generate --prompt TEXT` continues a text"

HTTP_PACKAGES = ("uvicorn", "httptools", "prometheus_client")  # of the extra `serve`

RECORD_ROOM = 16 << 20  # bytes that the disk must have before a recording; a token of a large model is 50 kB
MOST_CHARACTERS = 120  # of an error about a line of a file
MAX_TEXT_BYTES = 64 << 20  # of a text or a list of ids: far more than any context holds


def check_engine(config: EngineConfig, source: ModelSource | None = None) -> None:
    """`source`: the model, where it is open. Raises WrongUsage or a UsageError of the pipeline: one
    line that names what to change."""
    if config.policy is not None:
        make_policy(PolicyRequest(config.policy, config.policy_options), config.seed)
    if config.costs is not None:
        Costs.load(config.costs)
    if config.record is not None:
        check_one_device(config, "--record")
        check_new_file("--record", config.record, replace=False, room=RECORD_ROOM)
    folder = config.model or model_dir()
    source = source or open_model(folder)
    eos_ids(folder)  # before experts are encoded for minutes
    sampling_defaults(folder)
    expert_shape(source.config, config.tile, format_named(config.format or AUTOMATIC[0]))
    if config.http is not None:
        check_http(config.http, config.http_keys, config.allowed_origins)


def check_one_device(config: EngineConfig, what: str) -> None:
    """Raises WrongUsage where the layers are divided between devices."""
    if len(config.cards) > 1:
        names = ",".join(map(str, config.cards))
        raise WrongUsage(f"{what} needs all layers on one device: give one of {names}")


def check_calibration(config: EngineConfig, policies: Sequence[PolicyRequest]) -> None:
    """Raises PolicyError, or CalibrationError for a damaged file, where one of the policies that an engine
    will be set to cannot work with the model's calibration on this machine, or without one."""
    made = [make_policy(request, config.seed) for request in policies if request.name]
    needing = [policy for policy in made if policy.needs_calibration]
    if not needing:
        return
    path = calibration_path(user_folder("CACHE"), open_model(config.model or model_dir()))
    calibration = read(path)[0] if path.exists() else None
    for policy in needing:
        policy.check_calibration(calibration)


def check_new_file(option: str, path: Path, replace: bool = True, room: int = 0) -> None:
    """Raises WrongUsage unless a file can be made there, with room for so many bytes. `replace`: instead of
    one that exists."""
    try:
        if not replace and path.exists():
            raise WrongUsage(f"{option} {path}: it exists already; give another name, or remove it")
        if path.is_dir():
            raise WrongUsage(f"{option} {path}: it is a folder")
        check_creatable(path, room)
    except (OSError, ValueError) as e:  # ValueError: a name with a NUL
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise WrongUsage(f"{option} {path}: no file can be made there: {reason}") from None


def check_packages(option: str, *packages: str) -> None:
    """Raises WrongUsage unless these packages, which an extra of pyproject.toml names, are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        command = shlex.join((sys.executable, "-m", "pip", "install", *missing))
        raise WrongUsage(f"{option} needs the Python package {missing[0]}: run {command}")


def check_http(address: str, keys: Path | None, origins: Collection[str] = ()) -> None:
    """Raises WrongUsage unless a gateway with this file of API keys can serve there, and pages of these
    origins."""
    check_packages("--http", *HTTP_PACKAGES)
    from pipeline.gateway.access import is_loopback, read_api_keys, split_address

    if keys is None and not is_loopback(split_address(address)[0]):
        raise WrongUsage(f"--http {address}: other machines reach it, so give API keys with --http-keys FILE")
    if keys is None and "*" in origins:
        raise WrongUsage(
            "--allowed-origins *: any page in a browser could send requests, so give API keys with"
            " --http-keys FILE, or name the pages"
        )
    if keys is not None:
        try:
            read_api_keys(keys)
        except ProtocolError as e:
            raise WrongUsage(str(e)) from None


def check_request(source: Path, request: object) -> None:
    """Raises WrongUsage unless a request with the content of `source` fits a message."""
    try:
        encode(request)
    except MalformedMessage as e:
        raise WrongUsage(f"{source} cannot be sent to the engine: {e}") from None


def read_text(path: Path) -> str:
    """Returns a UTF-8 file. Raises WrongUsage."""
    try:
        return (content := read_file(path)).decode("utf-8")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise WrongUsage(f"{path} is not UTF-8 text (byte {e.start}, line {line})") from None


class WrongLine(Exception):
    """Raised for an invalid line of a file; the text names the error."""


def parse_line(line: str, kind: type[Record]) -> Record:
    """Returns the JSON object of a line as this struct. Raises WrongLine."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as e:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        more = f"; known are {known}" if "unknown field" in str(e) else ""
        raise WrongLine(f"{str(e)[:MOST_CHARACTERS]}{more}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise WrongLine(f"this is not JSON: {str(e)[:MOST_CHARACTERS]}") from None


def read_lines(path: Path, read: Callable[[str, int], T], what: str) -> list[T]:
    """Returns `read` of each line that is not blank and of its number, from 1. Raises WrongUsage, one line
    with the file and the line's number, where `read` raises WrongLine, and for a file without a `what`."""
    items = []
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            try:
                items.append(read(line, number))
            except WrongLine as e:
                raise WrongUsage(f"{path}, line {number}: {e}") from None
    if not items:
        raise WrongUsage(f"{path} has no {what}; write one JSON object a line")
    return items


def read_ids(path: Path) -> tuple[int, ...]:
    """Returns a JSON list of token ids. Raises WrongUsage."""
    try:
        return msgspec.json.decode(read_file(path), type=tuple[TokenId, ...])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as e:
        raise WrongUsage(f"{path} should hold a JSON list of token ids: {e}") from None


def read_file(path: Path, largest: int = MAX_TEXT_BYTES) -> bytes:
    """Returns a file of at most `largest` bytes. Raises WrongUsage."""
    try:
        return read_small(path, largest)
    except OSError as e:
        raise WrongUsage(f"cannot read {path}: {e.strerror}") from None


def check_reads_text(folder: Path, chats: bool = False, ids: str = IDS) -> None:
    """Raises WrongUsage, one line with what to do, for a model without tokenizer or, where it `chats`,
    without chat template; ModelError for an unknown shape and a damaged file. `ids`: what takes token ids
    instead. Loads no tokenizer: that may not end. What is no model is left to the loader."""
    instead = f", or use {ids}" if ids else ""
    if is_shape(folder):
        shape_config(str(folder))
        raise WrongUsage(
            f"{folder} has random weights and no tokenizer, so it reads no text and cannot chat: `bench`"
            " shows its speed, and `generate --prompt-tokens 1,2,3` runs it"
        )
    if is_gguf(folder):
        if not has_tokenizer(folder):
            raise WrongUsage(f"{NO_TOKENIZER}: take a file with one{instead}")
        if chats and not has_chat_template(folder):
            raise WrongUsage(NO_TEMPLATE)
    elif any(os.path.isfile(folder / name) for name in TOKENIZER_FILES):
        if chats and not has_chat_template(folder):
            raise WrongUsage(NO_TEMPLATE)
    elif os.path.isfile(folder / "config.json"):
        facts_of(read_fields(folder / "config.json"))  # a model that cannot be run needs no tokenizer
        raise WrongUsage(
            f"{NO_TOKENIZER}: put its tokenizer.json and tokenizer_config.json into {folder}{instead}"
        )
