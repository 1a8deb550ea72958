"""Options and commands that users of llama.cpp and Ollama type: each is refused in one line with ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from protocol.program import PROGRAM

_LAYERWISE = "--policy layerwise --expert-cache RATIO"
# Each option's own spelling here.
OPTIONS = {
    "-m": "--model DIR",
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--num-predict"), "--max-tokens N"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--n-ctx"), "--context N"),
    "-p": "--prompt TEXT",
    "-f": "--file FILE",
    **dict.fromkeys(("-sys", "--system-prompt"), "--system TEXT"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"), _LAYERWISE),
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot"), "--policy PRESET"),
    **dict.fromkeys(("-ub", "--ubatch-size", "-b", "--batch-size"), "--chunk N"),
    "-s": "--seed S",
    "--temp": "--temperature X",
    "--repeat-penalty": "--repetition-penalty X",
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop TEXT"),
    **dict.fromkeys(("--host", "--port"), "--http HOST:PORT"),
}
# What differs in meaning, by our spelling.
MEANINGS = {
    "--model DIR": "a Hugging Face directory (safetensors; GGUF is not read) or the Hub's ORG/NAME",
    _LAYERWISE: "the first layers' experts on the device, RATIO of all tiles; on a GPU by default as many"
    " as fit",
    "--policy PRESET": "where experts are resident and computed; all-host keeps them off the GPU",
}
THREADS = (
    "has no equivalent: an engine uses all cores that it may run on (`taskset` limits them); without a GPU"
    " --workers 0 is the fastest choice"
)
# Options of which no option here has the meaning.
WITHOUT_EQUIVALENT = dict.fromkeys(("-t", "--threads", "--num-thread"), THREADS)
# Where a command has an option of its own for it.
OF_COMMAND = {
    "bench": {"--max-tokens": "--gen-len G", "-p": "--prompt-len P", "-n": "--gen-len G", "-r": "--rounds N"},
    "score": {"-f": "--text FILE"},
}
COMMANDS = {
    "run": f"`{PROGRAM} --model DIR` chats with a model, `{PROGRAM} generate PROMPT` continues a text",
    "pull": "`--model ORG/NAME` downloads a model of the Hub at its first use",
    **dict.fromkeys(("list", "ls"), f"`{PROGRAM} cache` lists what is kept of models"),
    "rm": f"`{PROGRAM} cache --prune` removes what is kept of models",
    "show": f"`{PROGRAM} doctor --model DIR` shows a model and whether it fits",
    "perplexity": f"`{PROGRAM} score --text FILE` has the perplexity",
    "ps": f"`{PROGRAM} chat --connect x`, or any name that no engine has, shows the names of those that run",
    "stop": f"Ctrl-C, or SIGTERM to `{PROGRAM} serve`, stops an engine",
}
# Commands of other chats, by their names without the slash.
CHAT_COMMANDS = {
    "clear": "/reset clears the conversation",
    "new": "/reset clears the conversation",
    "show": "/stats shows the engine, /set the settings, /system the system message",
    "model": "a chat keeps its model; --model chooses it when an engine is started",
    "regen": "/retry asks the last question again",
    "?": "/help lists all",
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
        if word in WITHOUT_EQUIVALENT:
            return f"{word} {WITHOUT_EQUIVALENT[word]}"
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
