"""Chat templates in the styles of families, short and our own, and answers after their makers' descriptions:
each with reasoning, a text and calls of `weather` and `clock`."""

from __future__ import annotations

from dataclasses import dataclass

# What the answers below call.
CALLED = (("weather", {"city": "Oslo", "days": 2, "note": 'a "b" <c>'}), ("clock", {}))
ARGUMENTS = '{"city": "Oslo", "days": 2, "note": "a \\"b\\" <c>"}'
SCHEMAS = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "clock": {},
}


@dataclass(frozen=True)
class Style:
    """`answer`: of a model; `calls`: how many of CALLED are in it. `ending`: of a prompt behind a question;
    `ends`: tokens that end a turn. `special`: tokens without a text of their own."""

    name: str
    template: str
    answer: str
    ending: str
    calls: int = 2
    ends: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


HARMONY = Style(
    "harmony",
    """\
<|start|>system<|message|>It is {{ strftime_now('%Y') }}.
Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | length }} tools<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index:] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.final = true %}{% break %}
{%- endif %}
{%- endfor %}
{%- if message.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|return|> #}""",
    "<|channel|>analysis<|message|>Oslo, then.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    + ARGUMENTS
    + "<|call|>",
    "<|start|>assistant",
    calls=1,
    ends=("<|return|>", "<|call|>"),
    special=(
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
)

MINIMAX = Style(
    "minimax",
    """\
{%- set begin = '<minimax:tool_call>' %}{% set end = '</minimax:tool_call>' %}
{%- if tools %}]~b]system
{% for tool in tools %}<tool>{{ tool.function | tojson }}</tool>{% endfor %}[e~[
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ ']~b]ai\\n' }}
{%- if message.reasoning_content is string %}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- if message.tool_calls %}{{ '\\n' ~ begin ~ '\\n' }}
{%- for call in message.tool_calls %}{{ '<invoke name="' ~ call.function.name ~ '">\\n' }}
{%- for key, value in call.function.arguments.items() %}{{ '<parameter name="' ~ key ~ '">' }}
{{- value if value is string else value | tojson }}{{ '</parameter>\\n' }}
{%- endfor %}{{ '</invoke>\\n' }}{% endfor %}{{ end }}{% endif %}{{ '[e~[\\n' }}
{%- else %}{{ ']~b]' ~ message.role ~ '\\n' ~ message.content ~ '[e~[\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}""",
    """\
Oslo, then.</think>

I look.
<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Oslo</parameter>
<parameter name="days">2</parameter>
<parameter name="note">a "b" <c></parameter>
</invoke>
<invoke name="clock">
</invoke>
</minimax:tool_call>""",
    "<think>\n",
    ends=("[e~[",),
)

_DEEPSEEK = """\
{{ bos_token }}{% if tools %}{{ tools | length }} tools{% endif %}{% set ns = namespace(tool=false) %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.tool = false %}
{{- '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}
{{- '<｜Assistant｜></think>' }}
{{- message['content'] + '<｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}{{ CALL }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<｜Assistant｜></think>' + message['content'].split('</think>')[-1] }}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}
{%- if message['role'] == 'tool' %}{% set ns.tool = true %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}
{{- '<think>' if thinking else '</think>' }}{% endif %}"""

DEEPSEEK_V31 = Style(
    "deepseek-v3.1",
    _DEEPSEEK.replace(
        "CALL",
        "'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'"
        " + tool['function']['arguments'] + '<｜tool▁call▁end｜>'",
    ),
    "<think>Oslo, then.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "</think>",
    ends=("<｜end▁of▁sentence｜>",),
)

DEEPSEEK_R1 = Style(
    "deepseek-r1",
    _DEEPSEEK.replace(
        "CALL",
        "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']"
        " + '\\n```json\\n'"
        " + tool['function']['arguments'] + '\\n```' + '<｜tool▁call▁end｜>'",
    ).replace("{{- '<think>' if thinking else '</think>' }}", "{{- '<think>\\n' }}"),
    "Oslo, then.\n</think>\n\nI look.<｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<think>\n",
    ends=("<｜end▁of▁sentence｜>",),
)

_GLM = """\
[gMASK]<sop>{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>' + NL + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' + NL }}
{%- if loop.index0 > ns.last and m.reasoning_content is string %}
{{- '<think>' + m.reasoning_content.strip() + '</think>' }}{% else %}{{ '<think></think>' }}{% endif %}
{%- if m.content.strip() %}{{ NL + m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}{{ NL + '<tool_call>' + tc.function.name + NL }}
{%- for k, v in tc.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>' + NL + '<arg_value>' }}
{{- v if v is string else v | tojson }}{{ '</arg_value>' + NL }}{% endfor %}{{ '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>' + NL + '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{{ '<|system|>' + NL + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' + GEN }}{% endif %}"""

GLM45 = Style(
    "glm-4.5",
    _GLM.replace("NL", "'\\n'").replace("GEN", "''"),
    """
<think>Oslo, then.</think>
I look.
<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
<arg_key>note</arg_key>
<arg_value>a "b" <c></arg_value>
</tool_call>
<tool_call>clock
</tool_call>""",
    "<|assistant|>",
    ends=("<|user|>", "<|observation|>"),
)

GLM47 = Style(
    "glm-4.7",
    _GLM.replace("NL", "''").replace("GEN", "'<think>'"),
    "Oslo, then.</think>I look.<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    '<arg_key>days</arg_key><arg_value>2</arg_value><arg_key>note</arg_key><arg_value>a "b" <c></arg_value>'
    "</tool_call><tool_call>clock</tool_call>",
    "<think>",
    ends=("<|user|>", "<|observation|>"),
)

KIMI = Style(
    "kimi",
    """\
{%- macro render(c) %}{% if c is string %}{{ c }}{% endif %}{% endmacro %}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>
{{- '<think>' + message.reasoning_content | default('') + '</think>' }}{{ render(message.content) }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- elif message.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else %}<|im_user|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}""",
    "<think>Oslo, then.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.clock:1 "
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "<|im_middle|>",
    ends=("<|im_end|>",),
    special=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
)

_QWEN = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.reasoning_content is string %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + GEN }}{% endif %}"""

QWEN_JSON = Style(
    "qwen3-next",
    _QWEN.replace("CALL", "{{ call.function | tojson }}").replace("GEN", "''"),
    "<think>\nOslo, then.\n</think>\n\nI look.\n<tool_call>\n"
    f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "assistant\n",
    ends=("<|im_end|>",),
)

QWEN_XML = Style(
    "qwen3.5",
    _QWEN.replace(
        "CALL",
        "{{ '<function=' + call.function.name + '>\\n' }}"
        "{% for k, v in call.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
        "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}</function>",
    ).replace("GEN", "'<think>\\n'"),
    """\
Oslo, then.
</think>

I look.
<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
2
</parameter>
<parameter=note>
a "b" <c>
</parameter>
</function>
</tool_call>
<tool_call>
<function=clock>
</function>
</tool_call>""",
    "<think>\n",
    ends=("<|im_end|>",),
)

GEMMA = Style(
    "gemma",
    """\
{%- macro value(v) %}{% if v is string %}{{ '<|"|>' + v + '<|"|>' }}{% else %}{{ v | tojson }}{% endif %}
{%- endmacro %}{{ bos_token }}
{%- if tools %}<|turn>system
{% for tool in tools %}<|tool>{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|tool_response>response:' + value(message.content) + '<tool_response|>' }}
{%- else %}{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.reasoning %}{{ '<|channel>thought\\n' + message.reasoning + '<channel|>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{' }}
{%- for k, v in call.function.arguments.items() %}{{ k + ':' + value(v) + (',' if not loop.last else '') }}
{%- endfor %}{{ '}<tool_call|>' }}{% endfor %}
{%- if not message.tool_calls %}{{ '<turn|>\\n' }}{% endif %}{% endif %}
{%- endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<|turn>model\\n' }}{% endif %}""",
    "<|channel>thought\nOslo, then.<channel|>I look."
    '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2,note:<|"|>a "b" <c><|"|>}<tool_call|>'
    "<|tool_call>call:clock{}<tool_call|>",
    "model\n",
    ends=("<turn|>", "<|tool_response>"),
    special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
)

STYLES = (GEMMA, HARMONY, MINIMAX, DEEPSEEK_V31, DEEPSEEK_R1, GLM45, GLM47, KIMI, QWEN_JSON, QWEN_XML)
