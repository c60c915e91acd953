"""``diffusionlm-infer``: continue prompts, answer chats and fill masked spans. The arguments of the command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from cli.arguments import ADAPTER, MODEL, Shorthand, parse_command, require_model, toml_strings
from cli.entry import friendly_errors, usage_errors
from config.infer import InferConfig
from diffusionlm.inference.strategies import STRATEGIES

NAME = "diffusionlm-infer"

EXAMPLE = f"""  {NAME} --model runs/quickstart --prompt "def " --show
  {NAME} --model runs/quickstart --infill "for i in [MASK:1](10):\\n    print(i)\\n" --html replay.html
  {NAME} --model DIR --chat "Why is the sky blue?" --max-new-tokens 128
  {NAME} --model DIR --prompt "The sky is " --choice blue --choice gray
  {NAME} --model DIR --chat        # a chat in the terminal
  {NAME} --model DIR --image photo.jpg --chat "What is in the picture?"
  {NAME} --model DIR --prompts prompts.jsonl --output answers.jsonl --batch-size 32
  {NAME} --config config/resources/infer.toml --temperature 0.8 --json | jq .metrics"""

_SHORTHANDS = (
    MODEL,
    ADAPTER,
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

_TEXTS = {
    "prompt": ("input.prompts", "continue this text; may be repeated"),
    "infill": ("input.infills", "fill each [MASK:n] with n tokens; may be repeated"),
    "chat": ("input.chats", "answer this message; may be repeated; without a text, chat in the terminal"),
    "choice": ("constraint.choices", "each new text is this one, or another choice; may be repeated"),
}
"""Arguments that are texts: the key that all of one name replace, and the help."""
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
    require_model(config.model.path)
    # Imported here, so that --help and config errors do not wait for torch.
    from cli.infer.inputs import prepare_run
    from cli.infer.session import answer, run_chat
    from diffusionlm.checkpoints.huggingface import load_configured_model

    with usage_errors():
        builder, inputs = prepare_run(config)
    model = load_configured_model(config.model)
    if config.input.interactive:
        run_chat(model, builder, config.input)
    else:
        answer(model, builder, inputs, config)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(list_overrides=_list_overrides)
    group = parser.add_argument_group("texts; \\n, \\t and \\\\ are escapes in them")
    for name, (_, text) in _TEXTS.items():
        nargs = "?" if name == "chat" else None
        group.add_argument(f"--{name}", metavar="TEXT", action="append", default=[], nargs=nargs, help=text)
    text = "this JPEG, PNG or WebP file precedes the text of each chat or infill; may be repeated"
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help=text)


def _list_overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """The overrides that the texts stand for."""
    if None in arguments.chat:
        yield "input.interactive=true"
    for name, (key, _) in _TEXTS.items():
        texts = [text for text in getattr(arguments, name) if text is not None]
        if texts:
            yield f"{key}={toml_strings(map(_unescape, texts))}"
    if arguments.image:
        yield f"input.images={toml_strings(arguments.image)}"


def _unescape(text: str) -> str:
    """Replace ``\\n``, ``\\t`` and ``\\\\`` by a newline, a tab and a backslash; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPED_CHARACTERS[match[1]], text)
