"""How a family of models writes reasoning and calls of tools, found by the text of its chat template: special
strings that only this family's templates have. Nothing is rendered here.

Makers document their formats by example only; each form below says what one answer looks like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

THINK = ("<think>", "</think>")
# Tokens by which a model ends its turn. Files of a model may name its end of text alone.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|return|>", "<|call|>", "<|user|>", "<|observation|>", "<|tool_response>"),
)


@dataclass(frozen=True)
class CallForm:
    """How calls are written. `sign`: what only templates of this form have; `open`, `close`: around a call or
    several. `call`: one of them, with the groups `name` and `arguments`, or `json`, an object of both; and
    `id` where the model gives one. `parameter`: a key and a value, where the arguments are no JSON.
    `end`: of one call of several. `think`: around reasoning. `marks`: what may be special tokens, whose text
    is needed all the same, beside these. `quote`: around texts in JSON whose keys have no quotes."""

    sign: str
    open: str
    close: str
    call: re.Pattern[str]
    parameter: re.Pattern[str] | None = None
    end: str = ""
    think: tuple[str, str] = THINK
    marks: tuple[str, ...] = ()
    quote: str = ""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


# By name; the first whose sign is found.
FORMS = {
    # <|channel|>analysis<|message|>REASONING<|end|>
    # <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    # <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
    "harmony": CallForm(
        "<|channel|>",
        "<|start|>assistant",
        "<|call|>",
        _pattern(r"\s*.*?\bto=(?:functions\.)?(?P<name>[^\s<]+).*?<\|message\|>(?P<arguments>.*)\Z"),
        marks=(
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
    ),
    # <|channel>thought
    # REASONING<channel|>CONTENT<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:2}<tool_call|>, of Gemma 4
    "gemma": CallForm(
        "<|tool_call>",
        "<|tool_call>",
        "<tool_call|>",
        _pattern(r"\s*call:(?P<name>[^{\s]+)(?P<arguments>\{.*\})\s*\Z"),
        think=("<|channel>thought\n", "<channel|>"),
        marks=("<|channel>", '<|"|>'),
        quote='<|"|>',
    ),
    # <minimax:tool_call>
    # <invoke name="NAME">
    # <parameter name="KEY">VALUE</parameter>
    # </invoke>
    # </minimax:tool_call>
    "minimax": CallForm(
        "<minimax:tool_call>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _pattern(r"\s*<invoke name=\"?(?P<name>[^\">\n]+)\"?>(?P<arguments>.*?)(?:</invoke>|\Z)\s*"),
        _pattern(r"\s*<parameter name=\"?([^\">\n]+)\"?>\n?(.*?)\n?</parameter>\s*"),
        end="</invoke>",
    ),
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    # <｜tool▁calls▁end｜>, without the line break. R1 and V3 write function<｜tool▁sep｜>NAME, and
    # the arguments as a block of Markdown.
    "deepseek": CallForm(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _pattern(
            r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+?)"
            r"(?:\n```json\n|<｜tool▁sep｜>)(?P<arguments>.*?)(?:\n```)?\s*(?:<｜tool▁call▁end｜>|\Z)\s*"
        ),
        end="<｜tool▁call▁end｜>",
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    # <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
    # <|tool_call_end|><|tool_calls_section_end|>, without the line break
    "kimi": CallForm(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _pattern(
            r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<\s]+?)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?:<\|tool_call_end\|>|\Z)\s*"
        ),
        end="<|tool_call_end|>",
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
    # <tool_call>NAME
    # <arg_key>KEY</arg_key>
    # <arg_value>VALUE</arg_value>
    # </tool_call>, and GLM-4.7 writes no line breaks
    "glm": CallForm(
        "<arg_key>",
        "<tool_call>",
        "</tool_call>",
        _pattern(r"\s*(?P<name>[^<\s]+)\s*(?P<arguments>(?:<arg_key>.*)?)\Z"),
        _pattern(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"),
        marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    # <tool_call>
    # <function=NAME>
    # <parameter=KEY>
    # VALUE
    # </parameter>
    # </function>
    # </tool_call>, of Qwen3-Coder and Qwen3.5
    "xml": CallForm(
        "<function=",
        "<tool_call>",
        "</tool_call>",
        _pattern(
            r"\s*(?:<function=(?P<name>[^>\n]+)>(?P<arguments>.*?)(?:</function>)?|(?P<json>\{.*\}))\s*\Z"
        ),
        _pattern(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*"),
    ),
    # <tool_call>
    # {"name": NAME, "arguments": {...}}
    # </tool_call>, of Hermes, Qwen2.5, Qwen3 and Qwen3-Next
    "json": CallForm("<tool_call>", "<tool_call>", "</tool_call>", _pattern(r"(?P<json>.*)\Z")),
}


@dataclass(frozen=True)
class TemplateKind:
    """`thinks`: answers may begin with reasoning. `tools`: it renders tools; where it has no place for them,
    they are written into the system message (`chat_history.py`). `calls`: how the model writes calls, of
    FORMS, or "" where it has another form, which is not parsed."""

    thinks: bool = False
    tools: bool = False
    calls: str = ""

    @classmethod
    def of_text(cls, text: str) -> TemplateKind:
        """Returns what a template of this text can do."""
        found = (name for name, form in FORMS.items() if form.sign in text and form.open in text)
        tools = "tools" in text
        name = next(found, "")
        kind = cls(tools=tools, calls=name if tools or name == "harmony" else "json")
        return replace(kind, thinks=kind.calls == "harmony" or kind.think[1] in text)

    @property
    def form(self) -> CallForm | None:
        return FORMS.get(self.calls)

    @property
    def think(self) -> tuple[str, str]:
        """Returns the marks around reasoning, but those of Harmony's messages."""
        return THINK if self.form is None else self.form.think

    @property
    def end(self) -> str:
        """The text behind one call; "" where the model ends its answer there."""
        return "" if self.form is None or self.calls == "harmony" else self.form.end or self.form.close

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns the markers that the text of an answer has to show, so that it can be taken apart."""
        reasoning, form = self.think if self.thinks else (), self.form
        return reasoning if form is None else (*reasoning, form.open, form.close, form.end, *form.marks)
