"""``diffusionlm-infer``: continue prompts, answer chats and fill masked spans. The arguments of the command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from cli.arguments import Shorthand, add_overrides, parse_command, toml_string
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from config.infer import InferConfig
from diffusionlm.inference.strategies import STRATEGIES

NAME = "diffusionlm-infer"

EXAMPLE = f"""  {NAME} --model runs/quickstart --prompt "def " --show
  {NAME} --model runs/quickstart --infill "for i in [MASK:1](10):\\n    print(i)\\n" --html replay.html
  {NAME} --model DIR --chat "Why is the sky blue?" --max-new-tokens 128
  {NAME} --model DIR --prompt "The sky is " --choice blue --choice gray
  {NAME} --model DIR --chat        # a chat in the terminal
  {NAME} --model DIR --prompts prompts.jsonl --output answers.jsonl --batch-size 32
  {NAME} --config config/resources/infer.toml --temperature 0.8 --json | jq .metrics"""

_SHORTHANDS = (
    Shorthand("--model", "DIR", "model.path={string}", "model directory, checkpoint or run, or org/name on the Hub"),
    Shorthand("--adapter", "DIR", "model.adapter={string}", "PEFT adapter (LoRA) of the model"),
    Shorthand(
        "--prompts",
        "FILE",
        "input.prompts_file={string}",
        "one prompt per line, or a .jsonl file of prompts, messages and infills; - is standard input",
    ),
    Shorthand("--system", "TEXT", "input.system={string}", "system message of chats"),
    Shorthand("--regex", "PATTERN", "constraint.regex={string}", "each new text matches this regular expression"),
    Shorthand("--json-schema", "FILE", "constraint.json_schema={string}", "each new text is JSON of this schema"),
    Shorthand("--seed", "N", "input.seed={text}", "seed of the first request"),
    Shorthand("--batch-size", "N", "input.batch_size={text}", "requests that are decoded together"),
    Shorthand("--max-new-tokens", "N", "generation.max_new_tokens={text}", "new tokens of a prompt or chat"),
    Shorthand("--temperature", "X", "generation.temperature={text}", "temperature of token sampling; 0 is greedy"),
    Shorthand("--steps", "N", "generation.steps={text}", "forwards of the whole answer, divided among its blocks"),
    Shorthand("--block-length", "N", "generation.block_length={text}", "tokens per block"),
    Shorthand(
        "--strategy",
        "NAME",
        "generation.remasking_strategy={string}",
        f"which positions are committed after a forward: {', '.join(STRATEGIES)}",
    ),
    Shorthand("--output", "FILE", "output.file={string}", "write the JSON lines to this new file"),
    Shorthand("--html", "FILE", "output.html={string}", "write a page that replays the decoding in a browser"),
    Shorthand("--show", None, "output.show=true", "show the text after every forward"),
    Shorthand("--json", None, 'output.format="json"', "print one JSON object per request"),
)

_TEXT_KEYS = {
    "prompts": "input.prompts",
    "chats": "input.chats",
    "infills": "input.infills",
    "choices": "constraint.choices",
}
"""Arguments that are texts, and what they override."""
_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "\\": "\\"}


@friendly_errors(NAME, "lower input.batch_size or generation.max_new_tokens")
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        InferConfig,
        name=NAME,
        description="Continue prompts, answer chats and fill masked spans with a masked diffusion language model.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_texts,
        shorthands=_SHORTHANDS,
        argv=argv,
    )
    if config.model.path is None:
        exit_with_usage_error(NAME, "no model given: add --model DIR, or path to [model] of the config")
    # Imported here, so that --help and config errors do not wait for torch.
    from cli.infer.inputs import prepare_run
    from cli.infer.session import answer, run_chat
    from diffusionlm.checkpoints.huggingface import load_configured_model

    with usage_errors(NAME):
        prepared = prepare_run(config)
    model = load_configured_model(config.model)
    run = run_chat if config.input.interactive else answer
    run(model, prepared, config)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(raw=False, **{dest: [] for dest in _TEXT_KEYS})
    group = parser.add_argument_group("texts; \\n, \\t and \\\\ are escapes in prompts, chats, infills and choices")
    for name, text in (
        ("prompt", "continue this text; may be repeated"),
        ("infill", "fill each [MASK:n] with n tokens; may be repeated"),
        ("chat", "answer this message; may be repeated; without a text, chat in the terminal"),
        ("choice", "each new text is this one, or another choice; may be repeated"),
    ):
        nargs = "?" if name == "chat" else None
        group.add_argument(f"--{name}", metavar="TEXT", action=_TextAction, dest=f"{name}s", nargs=nargs, help=text)
    group.add_argument("--raw", action=_RawAction, nargs=0, help="do not read escapes in these texts")


class _TextAction(argparse.Action):
    """Append a prompt, chat, infill or choice; together they replace those of the config."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values is None:
            add_overrides(namespace, "input.interactive=true")
            return
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        _override_texts(namespace, self.dest)


class _RawAction(argparse.Action):
    """Turn off escapes, also in the texts before this argument."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.raw = True
        for dest in _TEXT_KEYS:
            if getattr(namespace, dest):
                _override_texts(namespace, dest)


def _override_texts(namespace: argparse.Namespace, dest: str) -> None:
    texts = [text if namespace.raw else _unescape(text) for text in getattr(namespace, dest)]
    value = ", ".join(toml_string(text) for text in texts)
    add_overrides(namespace, f"{_TEXT_KEYS[dest]}=[{value}]")


def _unescape(text: str) -> str:
    """Replace ``\\n``, ``\\t`` and ``\\\\`` by a newline, a tab and a backslash; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPED_CHARACTERS[match[1]], text)
