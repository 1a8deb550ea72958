"""The model as Codex wants to know it, in `models` of GET /v1/models. Codex takes the context of a model that
it knows nothing of for 272,000 tokens, and shortens no conversation before."""

from __future__ import annotations

from pipeline.gateway.bodies import Object
from pipeline.text.chat_format import TemplateKind

EFFORTS = {"low": "thinks least", "medium": "thinks more", "high": "thinks most"}
# Codex has no words of its own for a model that it does not know. Short, since each token is prefilled.
INSTRUCTIONS = """\
You are a coding agent. You work in a folder of the user's machine, through your tools, until what the
user asks for is done. Look before you change: read the files that matter, and search instead of guessing.
Change only what the task needs, in the style of the code around it; never undo changes that are not
yours. Run the tests or the program where you can, and go on until it works. Follow AGENTS.md where there
is one. At the end say in a few sentences what you have done, and what you could not check."""


def codex_entry(name: str, context: int, kind: TemplateKind) -> Object:
    """Returns what Codex has to know of a model; it refuses an entry that lacks one of these."""
    efforts = EFFORTS if kind.thinks else {}
    return {
        "slug": name,
        "display_name": name,
        "description": "served by Tandem",
        "base_instructions": INSTRUCTIONS,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": context * 3 // 4,  # an answer, or the summary, needs room behind it
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, context // 8)},  # of a tool's output
        "default_reasoning_level": "medium" if efforts else None,
        "supported_reasoning_levels": [{"effort": e, "description": d} for e, d in efforts.items()],
        "supports_reasoning_summaries": kind.thinks,
        "shell_type": "shell_command",
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        "supports_search_tool": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
    }
