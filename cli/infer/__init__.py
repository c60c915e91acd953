"""``diffusionlm-infer``: continue prompts, answer chats and fill masked spans. The arguments of the command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cli.arguments import FlagShorthand, ValueShorthand, friendly_errors, parse_command, toml_string
from config.infer import InferConfig
from diffusionlm.inference.strategies import STRATEGIES

if TYPE_CHECKING:
    from cli.infer.inputs import Input
    from tokenizer import ChatTemplate

NAME = "diffusionlm-infer"

EXAMPLE = f"""  {NAME} --model runs/quickstart --prompt "def " --show
  {NAME} --model runs/quickstart --infill "def area(r):\\n    return [MASK:6]\\n" --html replay.html
  {NAME} --model DIR --chat "Why is the sky blue?" --max-new-tokens 128
  {NAME} --model DIR --chat        # a chat in the terminal
  {NAME} --model DIR --prompts prompts.jsonl --output answers.jsonl --batch-size 32
  {NAME} --config config/resources/infer.toml --temperature 0.8 --json | jq .metrics"""

_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "\\": "\\"}


def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        InferConfig,
        name=NAME,
        description="Continue prompts, answer chats and fill masked spans with a masked diffusion language model.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    with friendly_errors(NAME):
        _run(config, _load_inputs(config))


def _load_inputs(config: InferConfig) -> list[Input]:
    """Read the inputs and check the output paths, before the model is loaded. Exits with 2 on an error."""
    from cli.infer.answers import check_output_paths
    from cli.infer.inputs import read_inputs

    try:
        if config.model.path is None:
            raise ValueError("no model given: add --model DIR, or path to [model] of the config")
        check_output_paths(config.output)
        return read_inputs(config.input)
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    print(f"{NAME}: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are shorthands for --set; --print-config shows their effect."""
    parser.set_defaults(raw=False, prompts=[], infills=[], chats=[])
    group = parser.add_argument_group(
        "shorthands for --set; \\n, \\t and \\\\ are escapes in prompts, chats and infills"
    )
    group.add_argument(
        "--model", metavar="DIR", action=ValueShorthand, const="model.path", help="model directory, checkpoint or run"
    )
    group.add_argument(
        "--prompt", metavar="TEXT", action=_TextAction, dest="prompts", help="continue this text; may be repeated"
    )
    group.add_argument(
        "--infill",
        metavar="TEXT",
        action=_TextAction,
        dest="infills",
        help="fill each [MASK:n] with n tokens; may be repeated",
    )
    group.add_argument("--raw", action=_RawAction, nargs=0, help="do not read escapes in these texts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        action=ValueShorthand,
        const="input.prompts_file",
        help="one prompt per line, or a .jsonl file of prompts, messages and infills; - is standard input",
    )
    group.add_argument(
        "--chat",
        metavar="TEXT",
        action=_TextAction,
        nargs="?",
        dest="chats",
        help="answer this message; may be repeated; without a text, chat in the terminal",
    )
    group.add_argument(
        "--system", metavar="TEXT", action=ValueShorthand, const="input.system", help="system message of chats"
    )
    group.add_argument(
        "--seed", metavar="N", action=_NumberAction, const="input.seed", help="seed of the first request"
    )
    group.add_argument(
        "--batch-size",
        metavar="N",
        action=_NumberAction,
        const="input.batch_size",
        help="requests that are decoded together",
    )
    _add_generation(group)
    _add_output(group)


def _add_generation(group: argparse._ArgumentGroup) -> None:
    options = {
        "max-new-tokens": ("N", "max_new_tokens", "new tokens of a prompt or chat"),
        "temperature": ("X", "temperature", "temperature of token sampling; 0 is greedy"),
        "steps": ("N", "steps", "forwards over all blocks"),
        "block-length": ("N", "block_length", "tokens per block"),
    }
    for name, (metavar, key, text) in options.items():
        group.add_argument(f"--{name}", metavar=metavar, action=_NumberAction, const=f"generation.{key}", help=text)
    group.add_argument(
        "--strategy",
        metavar="NAME",
        action=ValueShorthand,
        const="generation.remasking_strategy",
        help=f"which positions are committed after a forward: {', '.join(STRATEGIES)}",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--show", action=FlagShorthand, nargs=0, const="output.show=true", help="show the text after every forward"
    )
    group.add_argument(
        "--json", action=FlagShorthand, nargs=0, const='output.format="json"', help="print one JSON object per request"
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        action=ValueShorthand,
        const="output.file",
        help="write the JSON lines to this new file",
    )
    group.add_argument(
        "--html",
        metavar="FILE",
        action=ValueShorthand,
        const="output.html",
        help="write a page that replays the decoding in a browser",
    )


class _NumberAction(argparse.Action):
    """Set the key `const` to the value, without quotes."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.overrides = [*namespace.overrides, f"{self.const}={values}"]


class _TextAction(argparse.Action):
    """Append a prompt, chat or infill; together they replace those of the config."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values is None:
            namespace.overrides = [*namespace.overrides, "input.interactive=true"]
            return
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        _override_texts(namespace, self.dest)


class _RawAction(argparse.Action):
    """Turn off escapes, also in the texts before this argument."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.raw = True
        for dest in ("prompts", "chats", "infills"):
            if getattr(namespace, dest):
                _override_texts(namespace, dest)


def _override_texts(namespace: argparse.Namespace, dest: str) -> None:
    texts = [text if namespace.raw else _unescape(text) for text in getattr(namespace, dest)]
    value = ", ".join(toml_string(text) for text in texts)
    namespace.overrides = [*namespace.overrides, f"input.{dest}=[{value}]"]


def _unescape(text: str) -> str:
    """Replace ``\\n``, ``\\t`` and ``\\\\`` by a newline, a tab and a backslash; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPED_CHARACTERS[match[1]], text)


def _run(config: InferConfig, inputs: list[Input]) -> None:
    # Imported here, so that --help and config errors do not wait for torch.
    from cli.infer.conversation import run_chat
    from cli.infer.session import answer
    from diffusionlm.checkpoints.huggingface import load_configured_model, load_tokenizer

    assert config.model.path is not None
    chats = config.input.interactive or any(item.kind == "chat" for item in inputs)
    template = _load_template(config) if chats else None
    tokenizer = load_tokenizer(config.model.path)
    model = load_configured_model(config.model)
    if config.input.interactive:
        run_chat(model, tokenizer, config, template)
    else:
        answer(model, tokenizer, inputs, config, template)


def _load_template(config: InferConfig) -> ChatTemplate | None:
    """The chat template of the config, else of the checkpoint; None: there is none."""
    from config.families.model_directory import resolve_model_directory
    from tokenizer import CHAT_TEMPLATES, load_chat_template

    assert config.model.path is not None
    if config.input.chat_template is not None:
        return CHAT_TEMPLATES[config.input.chat_template]
    return load_chat_template(config.model.path) or load_chat_template(resolve_model_directory(config.model.path))
