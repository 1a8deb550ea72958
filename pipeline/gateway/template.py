"""What a model's chat template can do, by its text; the gateway renders none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.index import read_fields
from pipeline.errors import ModelError
from pipeline.text.tokenizer import MAX_TOKENIZER_BYTES, SETTINGS, check_files
from protocol.small_files import read_small

MOST_BYTES = 1 << 22


@dataclass(frozen=True)
class TemplateKind:
    """`thinks`: answers may begin with reasoning between <think> and </think>. `tools`: it renders tools.
    `calls`: how the model writes a call between <tool_call> and </tool_call>: "json", "xml", or "" where
    it has another form, which is not parsed."""

    thinks: bool = False
    tools: bool = False
    calls: str = ""

    @classmethod
    def of_text(cls, text: str) -> TemplateKind:
        calls = ""
        if "<tool_call>" in text:
            calls = "xml" if "<function=" in text else "json"
        return cls("</think>" in text, "tools" in text, calls)


def read_template(model: Path) -> TemplateKind:
    """Of a model's directory; a plain one where it has none that can be read."""
    try:
        check_files(model)
        path = model / "chat_template.jinja"
        if path.is_file():
            return TemplateKind.of_text(read_small(path, MOST_BYTES).decode(errors="replace"))
        settings = model / SETTINGS
        found = (
            read_fields(settings, MAX_TOKENIZER_BYTES).get("chat_template") if settings.is_file() else None
        )
    except (ModelError, OSError):
        return TemplateKind()
    if isinstance(found, list):
        found = "\n".join(str(entry.get("template")) for entry in found if isinstance(entry, dict))
    return TemplateKind.of_text(found) if isinstance(found, str) else TemplateKind()
