"""Chat templates: those that a directory brings along, and a few that are built in."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from files.atomic import write_text_atomic
from tokenizer.huggingface import read_role_token

CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_JSON_FILE = "chat_template.json"


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become one text.

    Args:
        source: Jinja, as in the `chat_template` of a tokenizer_config.json.
        tokens: the special tokens that it may name: `bos_token`, `eos_token` and so on.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)


_CHECK_ROLE = """\
{%- if message.role not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('role ' + message.role|string + ' is unknown: use system, user or assistant') }}
{%- endif %}
{%- if message.content is not string %}
    {{- raise_exception('the content of each message has to be a text') }}
{%- endif %}
"""

_NO_TOOLS = """\
{%- if tools %}
    {{- raise_exception('this template has no place for tools: use the one of a checkpoint that was trained on them') }}
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

# Thoughts are kept behind the last question only; an answer there has a block for them even if it is empty.
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
"""Templates of families, for texts without tools; written anew, they give what the checkpoints' own give."""


def load_chat_template(directory: str | os.PathLike[str], name: str = "default") -> ChatTemplate | None:
    """The chat template that a model directory brings along, or None.

    chat_template.jinja comes first, then chat_template.json, then `chat_template` in tokenizer_config.json; the last
    two may hold several by name. Further named ones are looked for in additional_chat_templates/.

    Raises:
        ValueError: a file cannot be read or is not as the format has it, or no template has this name.
    """
    folder = Path(directory)
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.is_file() else {}
    found: dict[str, str] = {}
    json_path = folder / CHAT_TEMPLATE_JSON_FILE
    for path, contents in ((config_path, config), (json_path, _read_json(json_path) if json_path.is_file() else {})):
        found |= _named_templates(path, contents.get("chat_template"))
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        found["default"] = _read_text(folder / CHAT_TEMPLATE_FILE)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    if name not in found:
        if not found or name == "default":
            return None
        raise ValueError(f"{folder}: has no chat template {name!r}, only {', '.join(sorted(found))}")
    named = {key: read_role_token(key, config) for key in config if key.endswith("_token") and "add_" not in key}
    return ChatTemplate(found[name], {key: text for key, text in named.items() if text is not None})


def save_chat_template(template: ChatTemplate, directory: str | os.PathLike[str]) -> None:
    """Write chat_template.jinja, with the texts of the special tokens that it names set at its head.

    So transformers and `load_chat_template` need no other file for them.
    """
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
        found = {entry["name"]: entry["template"] for entry in listed}
    except (KeyError, TypeError):
        found = {"": None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ValueError(f"{path}: chat_template is neither a text nor a list of tables with name and template")
    return found


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: holds {type(contents).__name__}, expected a JSON object")
    return contents
