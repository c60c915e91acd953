"""The chat template of a source: built-in, of a file, or of the run's tokenizer, and its checks before a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.finetune.chat import ChatRowsConfig
from files.json_files import read_text
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, encode_answer, load_chat_template, render_chat

QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "an Answer: 1 < 2"}


def resolve_chat_template(config: ChatRowsConfig, tokenizer: Tokenizer | None, key: str) -> ChatTemplate:
    """Return the template that a section names, else that of the tokenizer, with the section's variables.

    Args:
        tokenizer: None: it is to be trained, so it has no template, and only the source of the section's is checked.

    Raises:
        ValueError: there is no such template; or it has no generation prompt, writes the beginning of text twice, or no
            special token of the tokenizer after an answer.
    """
    setting = f'{key}.template = "{config.template}"' if config.template else f"{key}.template"
    try:
        template = find_chat_template(config.template, tokenizer)
        template = _set_variables(template, config.template_variables)
        if tokenizer is not None:
            _check_template(template, tokenizer)
    except (ValueError, OSError) as error:
        raise ValueError(f"{setting}: {error}") from error
    return template


def hash_template_files(config: ChatRowsConfig) -> str | None:
    """Hash the contents of the section's template; None: it is not a file or directory, or cannot be read.

    `resolve_chat_template` reports what cannot be read.
    """
    if config.template is None or config.template in CHAT_TEMPLATES:
        return None
    try:
        template = _read_template(Path(config.template).expanduser())
    except (ValueError, OSError):
        return None
    return hashlib.sha256(json.dumps([template.source, dict(template.tokens)]).encode()).hexdigest()


def find_chat_template(name: str | None, tokenizer: Tokenizer | None) -> ChatTemplate:
    """Return the template of a name, a file with Jinja or a directory; None: that of the tokenizer.

    Raises:
        ValueError: there is none.
    """
    builtin = ", ".join(CHAT_TEMPLATES)
    if name is None:
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer has no chat template: name one of {builtin}, or a file with Jinja")
        return tokenizer.chat_template
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    path = Path(name).expanduser()
    template = _read_template(path)
    if path.is_dir() or tokenizer is None:
        return template
    roles = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    return ChatTemplate(template.source, {key: text for key, text in roles.items() if text is not None})


def _read_template(path: Path) -> ChatTemplate:
    """Read the template of a model directory, or a file with Jinja."""
    if path.is_file():
        return ChatTemplate(read_text(path, newline=""))
    if not path.is_dir():
        raise ValueError(f"there is no such built-in template ({', '.join(CHAT_TEMPLATES)}), file or directory")
    template = load_chat_template(path)
    if template is None:
        raise ValueError("the directory has no chat template")
    return template


def _set_variables(template: ChatTemplate, variables: Mapping[str, Any]) -> ChatTemplate:
    """Write the defaults of variables into the template, so that a checkpoint's template has them at inference too."""
    lines = (
        f"{{%- if {name} is not defined %}}{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{% endif %}}\n"
        for name, value in sorted(variables.items())
    )
    return ChatTemplate("".join(lines) + template.source, template.tokens)


def _check_template(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Check generation prompt, stop token and beginning of text on a short chat."""
    with_prompt, without_prompt = (
        render_chat(template, [QUESTION], add_generation_prompt=is_added) for is_added in (True, False)
    )
    answered = render_chat(template, [QUESTION, ANSWER], add_generation_prompt=False)
    header, written, _ = answered.removeprefix(without_prompt).partition(ANSWER["content"])
    if with_prompt == without_prompt and header.strip() and written:
        raise ValueError(
            f"the chat template has no generation prompt: it writes {header!r} before an answer, and nothing for "
            "add_generation_prompt; the model would have to begin its answers with that"
        )
    answer = encode_answer(tokenizer, template, [QUESTION, ANSWER])
    if answer is None:
        raise ValueError("the chat template marks no answer with {% generation %}, although it has this tag")
    bos = tokenizer.bos_token_id
    token_ids = [*answer.prompt_ids, *answer.answer_ids]
    if bos is not None and bos not in (tokenizer.eos_token_id, answer.answer_ids[-1]) and token_ids.count(bos) > 1:
        raise ValueError(f"the chat template writes the beginning of text, {tokenizer.bos_token!r}, more than once")


def find_stop_token(template: ChatTemplate, tokenizer: Tokenizer) -> int:
    """Return the token after an answer, at which generation must end."""
    answer = encode_answer(tokenizer, template, [QUESTION, ANSWER])
    assert answer is not None, "the template was checked"
    return answer.answer_ids[-1]
