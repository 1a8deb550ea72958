"""Options and commands that users of llama.cpp and Ollama type: each is refused in one line with ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_EXPERT_CACHE = "--expert-cache RATIO"
_WORKERS = "--workers N"
# Each option's own spelling here.
OPTIONS = {
    "-m": "--model DIR",
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--num-predict"), "--max-tokens N"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--n-ctx"), "--context N"),
    "-p": "--prompt TEXT",
    "-f": "--file FILE",
    **dict.fromkeys(("-sys", "--system-prompt"), "--system TEXT"),
    **dict.fromkeys(("-t", "--threads", "--num-thread"), _WORKERS),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"), _EXPERT_CACHE),
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot"), "--policy PRESET"),
    **dict.fromkeys(("-ub", "--ubatch-size", "-b", "--batch-size"), "--chunk N"),
    "-s": "--seed S",
    "--temp": "--temperature X",
    "--repeat-penalty": "--repetition-penalty X",
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop TEXT"),
    **dict.fromkeys(("--host", "--port"), "--listen tcp://ADDRESS:PORT"),
}
# What differs in meaning, by our spelling.
MEANINGS = {
    _WORKERS: "expert workers, by default one for each core",
    _EXPERT_CACHE: "the share of the expert tiles on the device, on a GPU by default as much as fits",
    "--policy PRESET": "where experts are resident and computed; all-host keeps them off the GPU",
}
# Where a command has an option of its own for it.
OF_COMMAND = {
    "bench": {"-p": "--prompt-len P", "-n": "--gen-len G", "-r": "--rounds N"},
    "score": {"-f": "--text FILE"},
}
COMMANDS = {
    "run": "`launch.py --model DIR` chats with a model, `launch.py generate PROMPT` continues a text",
    "pull": "`--model ORG/NAME` downloads a model of the Hub at its first use",
    **dict.fromkeys(("list", "ls"), "`launch.py cache` lists what is kept of models"),
    "rm": "`launch.py cache --prune` removes what is kept of models",
    "show": "`launch.py doctor --model DIR` shows a model and whether it fits",
    "perplexity": "`launch.py score --text FILE` has the perplexity",
}


def explain(arguments: Sequence[str], options: Mapping[str, Collection[str]]) -> str:
    """A line for the first argument that is another program's option, or "". `options`: those of each
    command, and of "" for none."""
    command = next((argument for argument in arguments if argument in options), "")
    for argument in arguments:
        if argument == "--":
            break
        word = argument.partition("=")[0]
        found = re.fullmatch(r"(-\w)\d+", word)  # -n100
        word = found[1] if found else word
        ours = OF_COMMAND.get(command, {}).get(word) or OPTIONS.get(word)
        if ours is not None:
            return f"{word} is {ours} here{_where(ours, command, options)}"
    return ""


def _where(ours: str, command: str, options: Mapping[str, Collection[str]]) -> str:
    """What the option means, or the commands that have it where this one has not."""
    name = ours.split()[0]
    if name in options[command]:
        return f": {MEANINGS[ours]}" if ours in MEANINGS else ""
    others = [other for other in options if other and name in options[other]]
    return f", and belongs to {', '.join(others)}"
