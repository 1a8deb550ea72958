"""GGUF files in a repository of the Hugging Face Hub: `--model ORG/NAME:TYPE`. A repository has a model in
several quantizations, each one file or several parts; TYPE is what tells their names apart, like Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from launch.errors import WrongUsage
from pipeline.models.shapes import GGUF, OTHER_GGUF

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
