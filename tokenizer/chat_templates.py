"""Chat templates, and those of model families that are built in."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChatTemplate:
    """A template that renders messages to one text.

    Args:
        source: Jinja, as in the `chat_template` of a tokenizer_config.json.
        tokens: special tokens that the source may use, by role: `bos_token`, `eos_token` and so on.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)


_CHECK_ROLE = """\
{%- if message.role not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('role ' + message.role|string + ' is unknown: use system, user or assistant') }}
{%- endif %}
{%- if message.content is not string %}
    {{- raise_exception('the content of each message must be a string') }}
{%- endif %}
"""

_NO_TOOLS = """\
{%- if tools %}
    {{- raise_exception('this template does not support tools: use the template of a checkpoint that was trained with
    tools') }}
{%- endif %}
"""

_CHATML = f"""\
{_NO_TOOLS}
{{%- for message in messages %}}
    {_CHECK_ROLE}
    {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}
"""

# Reasoning is kept only after the last question; an answer there has a block for it, even an empty one.
_QWEN3 = f"""\
{_NO_TOOLS}
{{%- set last = namespace(question=messages|length) %}}
{{%- for message in messages if message.role == 'user' %}}
    {{%- set last.question = loop.index0 %}}
{{%- endfor %}}
{{%- set seen = namespace(questions=0) %}}
{{%- for message in messages %}}
    {_CHECK_ROLE}
    {{{{- '<|im_start|>' + message.role + '\\n' }}}}
    {{%- if message.role == 'assistant' %}}
        {{%- set content = message.content %}}
        {{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}}
        {{%- if not thoughts and '</think>' in content %}}
            {{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{%- if seen.questions > last.question and (loop.last or thoughts) %}}
            {{{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}}}
        {{%- else %}}
            {{{{- content }}}}
        {{%- endif %}}
    {{%- else %}}
        {{%- if message.role == 'user' %}}
            {{%- set seen.questions = seen.questions + 1 %}}
        {{%- endif %}}
        {{{{- message.content }}}}
    {{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}
"""

_LLAMA3 = f"""\
{_NO_TOOLS}
{{{{- bos_token }}}}
{{%- for message in messages %}}
    {_CHECK_ROLE}
    {{{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content|trim + '<|eot_id|>' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}}}
{{%- endif %}}
"""

CHAT_TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": ChatTemplate(_CHATML),
    "qwen3": ChatTemplate(_QWEN3),
    "llama3": ChatTemplate(_LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "llada": ChatTemplate(_LLAMA3, {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}),
}
"""Templates of model families, without tools; they render the same text as the templates of the checkpoints."""
