"""``diffusionlm-infer``: continue prompts and fill holes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from config.command import FlagShorthand, ValueShorthand, friendly_errors, parse_command, toml_string
from config.infer import InferConfig

NAME = "diffusionlm-infer"

EXAMPLE = f"""  {NAME} --model runs/quickstart --prompt "def " --show
  {NAME} --model runs/quickstart --infill "def area(r):\\n    return [MASK:6]\\n"
  {NAME} --config config/resources/infer.toml --set generation.temperature=0.8 --json"""

_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, decode, print."""
    config, _ = parse_command(
        InferConfig,
        name=NAME,
        description="Continue prompts and fill holes with a masked diffusion language model.",
        example=EXAMPLE,
        config_required=False,
        extra=_add_shorthands,
        argv=argv,
    )
    problem = _missing(config)
    if problem is not None:
        print(f"{NAME}: error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    with friendly_errors(NAME):
        _run(config)


def _missing(config: InferConfig) -> str | None:
    if config.model.path is None:
        return "no model given: add --model DIR, or path to [model] of the config"
    if not config.input.prompts and not config.input.infills:
        return 'nothing to do: add --prompt "TEXT" or --infill "TEXT with [MASK:4] holes"'
    return None


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    """Arguments that stand for overrides, so that --print-config shows what they do."""
    parser.set_defaults(raw=False, prompts=[], infills=[])
    group = parser.add_argument_group("shorthands for --set; \\n, \\t and \\\\ are read as escapes in the two texts")
    group.add_argument(
        "--model", metavar="DIR", action=ValueShorthand, const="model.path", help="model, checkpoint or run"
    )
    group.add_argument("--prompt", metavar="TEXT", action=_Text, dest="prompts", help="continue this; may be repeated")
    group.add_argument(
        "--infill", metavar="TEXT", action=_Text, dest="infills", help="fill its [MASK:n] holes; may be repeated"
    )
    group.add_argument("--raw", action=_Raw, nargs=0, help="take backslashes in --prompt and --infill as they are")
    group.add_argument("--seed", metavar="N", action=_Seed, help="of the first request")
    group.add_argument("--show", action=FlagShorthand, nargs=0, const="output.show=true", help="show every forward")
    group.add_argument(
        "--json", action=FlagShorthand, nargs=0, const='output.format="json"', help="one JSON object a request"
    )


class _Seed(argparse.Action):
    """Not quoted: a number."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.overrides = [*namespace.overrides, f"input.seed={values}"]


class _Text(argparse.Action):
    """One more prompt or infill; together they take the place of the config's."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])
        _override_texts(namespace, self.dest)


class _Raw(argparse.Action):
    """Also for the texts that came before it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.raw = True
        for dest in ("prompts", "infills"):
            if getattr(namespace, dest):
                _override_texts(namespace, dest)


def _override_texts(namespace: argparse.Namespace, dest: str) -> None:
    texts = [text if namespace.raw else _unescaped(text) for text in getattr(namespace, dest)]
    value = ", ".join(toml_string(text) for text in texts)
    namespace.overrides = [*namespace.overrides, f"input.{dest}=[{value}]"]


def _unescaped(text: str) -> str:
    """``\\n``, ``\\t`` and ``\\\\`` as a newline, a tab and a backslash; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def _run(config: InferConfig) -> None:
    # Only now, so that --help and config errors do not wait for torch.
    from diffusionlm.checkpoints.huggingface import load_tokenizer
    from diffusionlm.checkpoints.loading import open_model
    from diffusionlm.inference.session import answer

    assert config.model.path is not None
    answer(open_model(config.model), load_tokenizer(config.model.path), config)


if __name__ == "__main__":
    main()
