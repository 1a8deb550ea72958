"""The bodies of requests in the three dialects (OpenAI's chat and completions, OpenAI's responses,
Anthropic's messages) and of the endpoints for tokens, as structs. null counts as not given everywhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MOST_SEED = (1 << 63) - 1
MOST_TOKENS = 1 << 31
MOST_CHOICES = 16
MOST_TOP = 20
MOST_PROMPTS = 512
MOST_IDS = 1 << 20

# Whole numbers, of which some clients write 5 as 5.0
Tokens = Annotated[float, Meta(ge=1, le=MOST_TOKENS, multiple_of=1)]
TokensOrNone = Annotated[float, Meta(ge=0, le=MOST_TOKENS, multiple_of=1)]
TopK = Annotated[float, Meta(ge=-1, le=1 << 31, multiple_of=1)]
Choices = Annotated[float, Meta(ge=1, le=MOST_CHOICES, multiple_of=1)]
One = Annotated[float, Meta(ge=1, le=1)]
Top = Annotated[float, Meta(ge=0, le=MOST_TOP, multiple_of=1)]
Seed = Annotated[int, Meta(ge=-MOST_SEED, le=MOST_SEED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Object = dict[str, Any]
ToolObjects = Annotated[list[Object], Meta(max_length=512)]
OpenAiEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(Struct):
    include_usage: bool | None = None


class SchemaObject(Struct):
    schema: Object


class Format(Struct):
    """What an answer has to follow, by one of its fields, as `type` says."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: SchemaObject | None = None
    schema: Object | None = None
    grammar: str | None = None
    regex: str | None = None


class Structured(Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: str | Object | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: str | list[str] | None = None


class Common(Struct, kw_only=True):
    """Fields of all endpoints with an answer: how tokens are chosen, where it ends, what it follows."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Meta(ge=1e-9, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: Structured | None = None
    guided_json: str | Object | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: str | list[str] | None = None


# --- OpenAI's chat and completions ----------------------------------------------------------------------


class TextPart(Struct):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


Content = str | list[TextPart] | None


class CalledFunction(Struct):
    name: str
    arguments: str | Object


class CallPart(Struct):
    """A tool's call in a conversation so far."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class ChatTurn(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[CallPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


Turns = Annotated[list[ChatTurn], Meta(min_length=1, max_length=4096)]


class Function(Struct):
    name: str
    description: str | None = None
    parameters: Object | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class ChatBody(Common, kw_only=True):
    messages: Turns
    stop: str | list[str] | None = None
    n: Choices | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: ToolObjects | None = None  # as the template reads them; each is a Tool
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    response_format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: OpenAiEffort | None = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    stop: str | list[str] | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    max_tokens: TokensOrNone | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Top | None = None
    response_format: Format | None = None


# --- OpenAI's responses ---------------------------------------------------------------------------------


class FlatTool(Struct):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Object | None = None


class MessageItem(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None


class CallItem(Struct):
    call_id: str
    name: str
    arguments: str | Object


class OutputItem(Struct):
    call_id: str
    output: Content = None


class ReasoningItem(Struct):
    """Reasoning of an earlier answer, which is not rendered."""


class TextOptions(Struct):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct):
    effort: OpenAiEffort | None = None


class ResponsesBody(Common, kw_only=True):
    input: str | Annotated[list[Object], Meta(min_length=1)]  # each is an item, by its `type`
    instructions: str | None = None
    stop: str | list[str] | None = None
    n: One | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=512)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    format: Format | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[float, Meta(ge=0, le=0)] | None = None
    include: list[str] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


# --- Anthropic's messages -------------------------------------------------------------------------------


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class RedactedBlock(Struct, tag="redacted_thinking"):
    """Reasoning that only its maker can read."""


class UseBlock(Struct, tag="tool_use"):
    name: str
    id: str = ""
    input: Object | None = None


class ResultBlock(Struct, tag="tool_result"):
    tool_use_id: str
    content: Content = None


class MessageTurn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | RedactedBlock | UseBlock | ResultBlock] | None = None


class CustomTool(Struct):
    name: str
    input_schema: Object
    type: Literal["custom"] | None = None
    description: str | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class CountBody(Common, kw_only=True):
    """What POST /v1/messages/count_tokens reads: all but the answer's length."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=4096)]
    system: Content = None
    stop_sequences: str | list[str] | None = None
    n: One | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Tokens


# --- tokens ---------------------------------------------------------------------------------------------


class TokenizeBody(Struct, kw_only=True):
    """A text, or a conversation with the template's variables."""

    model: str | None = None
    prompt: str | None = None
    messages: Turns | None = None
    tools: ToolObjects | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: OpenAiEffort | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    tokens: Annotated[list[int], Meta(max_length=MOST_IDS)]
    model: str | None = None
