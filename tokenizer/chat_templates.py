"""Chat templates: loading from a model directory, and built-in ones."""

import json
import os
from pathlib import Path
from typing import Any

from files.atomic import write_text_atomic
from files.json_files import read_json_object, read_text
from tokenizer.chat_template import ChatTemplate
from tokenizer.huggingface import read_role_token

CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_JSON_FILE = "chat_template.json"


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


def load_chat_template(directory: str | os.PathLike[str], name: str = "default") -> ChatTemplate | None:
    """Load the chat template of a model directory; None if there is none.

    chat_template.jinja takes precedence over chat_template.json, and that over `chat_template` in
    tokenizer_config.json; the last two may contain several templates by name. additional_chat_templates/ contains
    further named templates.

    Raises:
        ValueError: a file cannot be read or has an unexpected structure, or no template has this name.
    """
    folder = Path(directory)
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    templates: dict[str, str] = {}
    json_path = folder / CHAT_TEMPLATE_JSON_FILE
    for path, contents in (
        (config_path, config),
        (json_path, read_json_object(json_path) if json_path.is_file() else {}),
    ):
        templates |= _named_templates(path, contents.get("chat_template"))
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        templates["default"] = read_text(folder / CHAT_TEMPLATE_FILE, newline="")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path, newline="")
    if name not in templates:
        if not templates or name == "default":
            return None
        raise ValueError(f"{folder}: has no chat template {name!r}, only {', '.join(sorted(templates))}")
    named = {key: read_role_token(key, config) for key in config if key.endswith("_token") and "add_" not in key}
    return ChatTemplate(templates[name], {key: text for key, text in named.items() if text is not None})


def save_chat_template(template: ChatTemplate, directory: str | os.PathLike[str]) -> None:
    """Write chat_template.jinja. It begins with definitions of its special tokens, so that transformers and
    `load_chat_template` need no other file."""
    source = template.source
    for key, text in sorted(template.tokens.items()):
        if key in source and f"set {key} = " not in source:
            source = f"{{%- set {key} = {json.dumps(text, ensure_ascii=False)} %}}\n{source}"
    write_text_atomic(Path(directory) / CHAT_TEMPLATE_FILE, source)


def _named_templates(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    listed = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(listed, dict):
        listed = [{"name": name, "template": text} for name, text in listed.items()]
    try:
        templates = {entry["name"]: entry["template"] for entry in listed}
    except (KeyError, TypeError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ValueError(f"{path}: chat_template is neither a string nor a list of objects with name and template")
    return templates
