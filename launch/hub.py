"""`--model org/name`: a model of the Hugging Face Hub, from this machine's cache of it or downloaded into it;
and `org/name:TYPE`, one of its GGUF files.

The cache is huggingface_hub's own, with its progress bars and environment variables. A model that is complete
in the cache is used as it is, without the network, even if the Hub has a newer version. Before the weights a
few kilobytes are downloaded and checked: architecture, format of the weights, free space.

Files are downloaded one after the other in the main thread, and not by snapshot_download: its pool of threads
ends only when the files under way are complete, so a Ctrl-C would take effect after gigabytes. Complete files
are kept: the next start continues after them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.parse import urlsplit

from launch.errors import DownloadFailed, LaunchError, WrongUsage
from launch.terminal.log import notice
from pipeline.errors import ModelError
from pipeline.models.shapes import GGUF, OTHER_GGUF, is_gguf
from protocol.program import one_line
from shm.segment import byte_size

log = logging.getLogger("tandem")

# A name as the Hub accepts it; a revision: a branch, a tag, or a commit; and a type of GGUF files.
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}))?(?::({_PART}))?", re.ASCII)
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Files that are read beside the weights. Neither code nor pickles.
SMALL = (
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
DEADLINE = 20.0  # seconds for the Hub to list a model's files


def is_hub_name(text: str) -> bool:
    """Returns whether this could be a model of the Hub, org/name, with @revision or :TYPE behind it."""
    match = _NAME.fullmatch(text)
    if match is None or re.search(r"\.\.|--", text) or match[1].endswith(".git"):
        return False
    return match[3] is not None or not is_gguf(text)  # which is a file that is not there


def model_folder(model: Path, download: bool) -> Path:
    """Returns what `--model` means: a shape or a path as it is, the GGUF file of a folder that has no other
    model, or the folder or GGUF file of a model of the Hub, which is downloaded; without `download` only its
    config, where the cache has none. Raises ModelError for a folder with several GGUF files or a part of one,
    WrongUsage where the Hub refuses the model or it cannot be run, DownloadFailed where it cannot be
    downloaded now."""
    name = str(model)
    match = _NAME.fullmatch(name)
    if os.path.isdir(model):
        from pipeline.checkpoint.gguf_file import gguf_in, gguf_models_in

        found = gguf_in(model)
        if found is None and (others := gguf_models_in(model)):
            notice(f"{model}: its safetensors are taken; --model {model / others[0]} takes its GGUF file")
        return found or model
    if os.path.exists(model) or match is None or not is_hub_name(name):
        return model
    from huggingface_hub import try_to_load_from_cache

    repository, revision, kind = match[1], match[2] or "main", match[3] or ""
    file = cached_gguf(_snapshot(repository, revision), kind)
    if file is not None and not _flaw(file):
        log.info(f"{name}: from {file}")
        return file
    config = None
    if not (kind and download):
        config = try_to_load_from_cache(repository, CONFIG, revision=revision)
    folder = Path(config).parent if isinstance(config, str) else None
    flaw = "" if folder is None else _flaw(folder)
    if folder is not None and (not download or (not flaw and _has_tokenizer(folder))):
        log.info(f"{name}: from {folder}")
        return folder
    try:
        return _download(name, repository, revision, kind, only_config=not download)
    except DownloadFailed as e:
        if folder is None:
            raise
        if flaw:
            raise DownloadFailed(f"{e}; the files in the cache are incomplete: {flaw}") from None
        log.warning(f"note: {name} has no tokenizer in {folder}, and none can be downloaded: {e}")
        return folder


def _snapshot(repository: str, revision: str) -> Path:
    """Returns the folder of a revision in the cache, which may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    store = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    try:
        commit = (store / "refs" / revision).read_text()
    except OSError:
        commit = revision
    return store / "snapshots" / commit


def _download(name: str, repository: str, revision: str, kind: str, only_config: bool) -> Path:
    """Returns the folder with all needed files, or the GGUF file, of one commit even if the model changes on
    the Hub meanwhile."""
    from huggingface_hub import HfApi, hf_hub_download

    _quiet()
    with _translate(name):
        # Tried once: an unreachable Hub is known at once, and not after six tries for the file.
        about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=DEADLINE)
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    _check_names(name, sizes)
    models = gguf_models(sizes)
    if kind or (models and SINGLE not in sizes and INDEX not in sizes):
        if not models:
            raise WrongUsage(f"{name}: it has no GGUF files; leave out :{kind}")
        files = choose(name, models, kind)
        _check_gguf(name, about.gguf)
        if not only_config:
            return _download_gguf(name, repository, revision, {file: sizes[file] for file in files})
        if CONFIG not in sizes:
            raise WrongUsage(
                f"{name}: its sizes are in the GGUF file alone, and this command does not download it"
                f" ({byte_size(sum(sizes[f] for f in files))}): name the model that it was made from"
            )
    else:
        _check_kind(name, sizes)
    with _translate(name):
        # by the revision's name, so that the cache records its commit
        folder = Path(hf_hub_download(repository, CONFIG, revision=revision)).parent
    _check_architecture(name, folder / CONFIG)
    if only_config:
        return folder
    weights = [SINGLE]
    if INDEX in sizes:
        with _translate(name):
            index = Path(hf_hub_download(repository, INDEX, revision=folder.name))
        weights = _shards(name, index, sizes)
    small = [file for file in sizes if any(_matches(file, pattern) for pattern in SMALL)]
    files = [file for file in (*small, *weights) if not (folder / file).exists()]
    _check_disk(name, sum(sizes[file] for file in files), len(files), folder.parents[2])
    if files:
        _fetch(name, repository, folder.name, {file: sizes[file] for file in files})
    notice(f"{name}: downloaded into {folder}")
    return folder


def _download_gguf(name: str, repository: str, revision: str, sizes: dict[str, int]) -> Path:
    """Returns the first of a GGUF model's files, in order with their sizes."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    wanted = {
        file: size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repository, file, revision=revision), str)
    }
    _check_disk(name, sum(wanted.values()), len(wanted), cache)
    first = _fetch(name, repository, revision, sizes)
    notice(f"{name}: downloaded: {first}")
    return first


def _fetch(name: str, repository: str, revision: str, sizes: dict[str, int]) -> Path:
    """Download files, in order with their sizes, all of the commit that the first one has; returns that one's
    place."""
    from huggingface_hub import hf_hub_download

    places = []
    for number, (file, size) in enumerate(sizes.items(), start=1):
        if not sys.stderr.isatty():  # on a terminal the library draws a bar
            notice(f"{name}: {file} ({number} of {len(sizes)}), {byte_size(size)}")
        with _translate(name):
            places.append(Path(hf_hub_download(repository, file, revision=revision)))
        revision = places[-1].parents[file.count("/")].name
    return places[0]


def _quiet() -> None:
    """Silence the libraries, which log each request, and each failure, which is an error of ours in the
    end."""
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _matches(file: str, pattern: str) -> bool:
    """Returns whether a pattern means a file, which it does in its own folder alone."""
    return file.count("/") == pattern.count("/") and fnmatchcase(file, pattern)


def _flaw(folder: Path) -> str:
    """Tells why a folder of the cache holds no complete checkpoint; "" where it does."""
    from pipeline.checkpoint.open import open_model

    try:
        open_model(folder)
    except ModelError as e:
        return str(e)
    return ""


def _has_tokenizer(folder: Path) -> bool:
    """Returns whether it has a tokenizer: other programs may have downloaded the weights alone."""
    from pipeline.text.tokenizer import TOKENIZER_FILES

    return any((folder / file).exists() for file in TOKENIZER_FILES)


def _check_names(name: str, sizes: dict[str, int]) -> None:
    """Raises WrongUsage for names of files that the library would write to the terminal, beside its bars, as
    they are."""
    if evil := next((file for file in sizes if one_line(file) != file), None):
        raise WrongUsage(f"{name}: the name of a file holds characters that control a terminal: {evil}")


def _check_kind(name: str, sizes: dict[str, int]) -> None:
    """Raises WrongUsage for a repository that holds no checkpoint."""
    if SINGLE not in sizes and INDEX not in sizes:
        raise WrongUsage(
            f"{name}: neither {SINGLE} nor {INDEX} nor a GGUF file is on the Hub, and only safetensors and"
            " GGUF are read"
        )
    if CONFIG not in sizes:
        raise WrongUsage(f"{name}: {CONFIG} is not on the Hub, and the model cannot be run without it")


def _check_architecture(name: str, config: Path) -> None:
    """Raises WrongUsage for a model that cannot be run, before its weights are downloaded."""
    from pipeline.checkpoint.index import read_fields
    from pipeline.models.facts import facts_of

    try:
        facts_of(read_fields(config))
    except ModelError as e:
        raise WrongUsage(f"{name}: {e}; nothing more was downloaded") from None


def _check_gguf(name: str, about: object) -> None:
    """Raises WrongUsage for GGUF files of an architecture that cannot be run, before they are downloaded,
    where the Hub says which it is."""
    from pipeline.checkpoint.gguf_config import READ

    architecture = about.get("architecture") if isinstance(about, dict) else None
    if isinstance(architecture, str) and architecture not in READ:
        raise WrongUsage(
            f"{name}: the GGUF architecture {one_line(architecture)[:40]} is not supported (only"
            f" {', '.join(READ)}); nothing was downloaded"
        )


def _shards(name: str, index: Path, sizes: dict[str, int]) -> list[str]:
    """Returns the weight files that an index names, in order. Raises WrongUsage where it names what is not
    there."""
    from pipeline.checkpoint.index import MAX_INDEX_BYTES, read_fields

    try:
        shards = sorted(set(read_fields(index, MAX_INDEX_BYTES)["weight_map"].values()))
    except (ModelError, KeyError, TypeError, AttributeError):
        raise WrongUsage(f"{name}: its {INDEX} is damaged") from None
    for shard in shards:
        if shard not in sizes or not fnmatchcase(shard, "*.safetensors"):
            raise WrongUsage(f"{name}: {INDEX} names {str(shard)[:80]!r}, which is not on the Hub")
    return shards


def _check_disk(name: str, need: int, files: int, cache: Path) -> None:
    """Log the download's size. Raises DownloadFailed where the disk has too little space for it."""
    free = shutil.disk_usage(cache).free
    if need > free:
        raise DownloadFailed(
            f"{name}: {byte_size(need)} have to be downloaded, and the disk of {cache} has {byte_size(free)}"
            " free; free some space, or set HF_HOME to a folder on a larger disk"
        )
    notice(f"{name}: downloading {files} files, {byte_size(need)}, into {cache} ({byte_size(free)} free)")


@contextmanager
def _translate(name: str) -> Iterator[None]:
    """Raises WrongUsage where the Hub refuses this model, DownloadFailed for everything else that
    huggingface_hub raises in the block."""
    from huggingface_hub.errors import HfHubHTTPError

    # the base of httpx's errors, or of httpx2's, whichever this version of the library uses
    transport = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    try:
        yield
    except (OSError, ValueError, transport) as error:
        raise _translated(name, error) from None


def _translated(name: str, error: BaseException) -> LaunchError:
    from huggingface_hub import constants, errors

    hub = urlsplit(constants.ENDPOINT).netloc
    # Where the Hub refuses a file, the library looks for it in the cache, and raises that it is not there.
    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.RevisionNotFoundError):
        return WrongUsage(f"{name}: the model is on {hub}, but not in this revision")
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        text = f"no folder of this name is here, and {hub} has no such model, or it is private"
        return WrongUsage(f"{name}: {text}; check the name, or {LOG_IN}")
    if status in (401, 403):
        return WrongUsage(f"{name}: access is restricted: request it on the page at {hub}, then {LOG_IN}")
    if status is not None:
        return DownloadFailed(f"{name}: {hub} answers with error {status}; try again later")
    if isinstance(error, errors.OfflineModeIsEnabled):
        text = "is not in the cache of this machine, and HF_HUB_OFFLINE forbids downloading it"
        return DownloadFailed(f"{name} {text}; unset it, or give a folder with --model")
    reason = (
        getattr(error, "strerror", None) or one_line(" ".join(str(error).split())) or type(error).__name__
    )
    elsewhere = f"`hf download {name.partition('@')[0]} --local-dir DIR`"
    return DownloadFailed(
        f"{name}: no folder of this name is here, and {hub} cannot be reached ({reason[:160]}): start again"
        f" later, or download it on another machine ({elsewhere}) and give that folder with --model"
    )


# ----------------------------------------------------------------------------------------------------------
# GGUF files in a repository of the Hugging Face Hub: `--model ORG/NAME:TYPE`. A repository has a model in
# several quantizations, each one file or several parts; TYPE is what tells their names apart, like Q4_K_M.


PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|B?F16|F32|(?:MX|NV)FP4)\w*)$", re.IGNORECASE)
MOST_TYPES = 40  # in a message

Models = dict[str, list[str]]


def gguf_models(files: Iterable[str]) -> Models:
    """Returns the files of each GGUF model among a repository's files, in order, by their common name:
    without folder, part and ending."""
    found: Models = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == GGUF and not path.name.lower().startswith(OTHER_GGUF):
            match = PART.fullmatch(path.stem)
            found.setdefault(match[1] if match else path.stem, []).append(file)
    return found


def choose(name: str, models: Models, kind: str) -> list[str]:
    """Returns the files of the model that `kind` means, or of the only one without a kind. Raises WrongUsage,
    one line that names what there is."""
    fitting = [base for base in models if not kind or _means(kind, base)]
    if len(fitting) == 1:
        return _complete(name, models[fitting[0]])
    labels = {base: match[1] if (match := TYPE.search(base)) else base for base in models}
    shown = fitting if fitting and kind else sorted(labels.values())
    listed = ", ".join(shown[:MOST_TYPES]) + ", ..." * (len(shown) > MOST_TYPES)
    repository = name.removesuffix(f":{kind}")
    if fitting and kind:
        raise WrongUsage(
            f"{name}: {len(fitting)} of its GGUF models have this in their name: {listed}; write more of it"
        )
    what = (
        f"has no GGUF model of this type, but {listed}"
        if kind
        else f"has {len(models)} GGUF models: {listed}"
    )
    raise WrongUsage(f"{name}: it {what}; write one as {repository}:{shown[0]}")


def cached_gguf(snapshot: Path, kind: str) -> Path | None:
    """Returns the first file of the model that `kind` means in a snapshot of the Hub's cache; None where it
    has none, several, or not all parts, and, without a kind, where it has a checkpoint in safetensors."""
    if not kind and any(snapshot.glob("*.safetensors*")):
        return None
    models = gguf_models(
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.exists()
    )
    try:
        return snapshot / choose("", models, kind)[0] if models else None
    except WrongUsage:
        return None


def _means(kind: str, base: str) -> bool:
    """Returns whether a type is a whole word of a model's name."""
    word = rf"(?:^|[-._]){re.escape(kind)}(?:$|[-.])"
    return re.search(word, base, re.IGNORECASE) is not None


def _complete(name: str, files: list[str]) -> list[str]:
    """Raises WrongUsage unless these are all parts of a model, each once."""
    parts = [PART.fullmatch(PurePosixPath(file).stem) for file in files]
    numbers = [(int(part[2]), int(part[3])) for part in parts if part]
    if len(numbers) < len(files) and len(files) > 1:
        raise WrongUsage(
            f"{name}: several files are this model: {', '.join(files[:4])}; download one of them"
        )
    if numbers and numbers != [(number, len(files)) for number in range(1, len(files) + 1)]:
        raise WrongUsage(f"{name}: {len(files)} of {numbers[0][1]} files are on the Hub: it is not complete")
    return files
