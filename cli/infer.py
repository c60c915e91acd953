"""``diffusionlm-infer``: continue prompts and fill holes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from config.command import friendly_errors, parse_command
from config.infer import InferConfig

if TYPE_CHECKING:
    from diffusionlm.inference.generate import Canvas, Generation, Step
    from diffusionlm.models.transformer import Transformer
    from tokenizer import Tokenizer

NAME = "diffusionlm-infer"

EXAMPLE = f"""  {NAME} --model runs/quickstart --prompt "def " --show
  {NAME} --model runs/quickstart --infill "def area(r):\\n    return [MASK:6]\\n"
  {NAME} --config config/resources/infer.toml --set generation.temperature=0.8 --json"""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, decode, print."""
    config, _ = parse_command(
        InferConfig,
        name=NAME,
        description="Continue prompts and fill holes with a masked diffusion language model.",
        example=EXAMPLE,
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
    # Everything has a default here, so no file is a config as good as any.
    parser.set_defaults(config=Path(os.devnull), raw=False, prompts=[], infills=[])
    group = parser.add_argument_group("shorthands for --set; \\n, \\t and \\\\ are read as escapes in the two texts")
    group.add_argument("--model", metavar="DIR", action=_Value, const="model.path", help="model, checkpoint or run")
    group.add_argument("--prompt", metavar="TEXT", action=_Text, dest="prompts", help="continue this; may be repeated")
    group.add_argument(
        "--infill", metavar="TEXT", action=_Text, dest="infills", help="fill its [MASK:n] holes; may be repeated"
    )
    group.add_argument("--raw", action=_Raw, nargs=0, help="take backslashes in --prompt and --infill as they are")
    group.add_argument("--seed", metavar="N", action=_Value, const="input.seed", help="of the first request")
    group.add_argument("--show", action=_Flag, nargs=0, const="output.show=true", help="show every forward")
    group.add_argument("--json", action=_Flag, nargs=0, const='output.format="json"', help="one JSON object a request")


class _Value(argparse.Action):
    """An argument whose text is the value of a key."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        value = values if self.const == "input.seed" else _toml_string(values)
        namespace.overrides = [*namespace.overrides, f"{self.const}={value}"]


class _Flag(argparse.Action):
    """An argument that is an override."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.overrides = [*namespace.overrides, self.const]


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
    value = ", ".join(_toml_string(text) for text in texts)
    namespace.overrides = [*namespace.overrides, f"input.{dest}=[{value}]"]


def _unescaped(text: str) -> str:
    """``\\n``, ``\\t`` and ``\\\\`` as a newline, a tab and a backslash; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def _toml_string(text: str) -> str:
    """A basic string of TOML; JSON's differ in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class _Batch:
    """Requests that are decoded together."""

    kind: str
    """``prompt`` or ``infill``."""
    texts: tuple[str, ...]
    inputs: list[list[int]]
    is_new: list[list[bool]]
    """Which positions of each canvas are to be decoded."""
    seeds: list[int]


def _run(config: InferConfig) -> None:
    # Only now, so that --help and config errors do not wait for torch.
    import torch

    from diffusionlm.checkpoints.huggingface import load_model, load_tokenizer
    from diffusionlm.inference.generate import generate, infill
    from diffusionlm.inference.text import ids_without_text

    assert config.model.path is not None
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    has_cuda = torch.cuda.is_available()
    if config.model.device == "cuda" and not has_cuda:
        raise ValueError('model.device = "cuda", but torch finds no CUDA device here: use "cpu" or "auto"')
    device = ("cuda" if has_cuda else "cpu") if config.model.device == "auto" else config.model.device
    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, device=device, dtype=config.model.dtype)
    unknown = ids_without_text(tokenizer, model.config.vocab_size)
    suppressed = (*config.generation.suppress_token_ids, *unknown)
    generation = config.generation.model_copy(update={"suppress_token_ids": suppressed})
    for batch in _batches(config, tokenizer, model):
        view = _LiveView(tokenizer, batch, config.output.format) if config.output.show else None
        start = time.perf_counter()
        decode = generate if batch.kind == "prompt" else infill
        done = decode(model, batch.inputs, generation, batch.seeds, view)
        seconds = time.perf_counter() - start
        if view is not None:
            view.close()
        for index, result in enumerate(done):
            _print(config, tokenizer, batch, index, result, seconds)


def _batches(config: InferConfig, tokenizer: Tokenizer, model: Transformer) -> Iterator[_Batch]:
    from diffusionlm.inference.text import parse_infill

    mask, new = model.config.mask_token_id, config.generation.max_new_tokens
    prompts = [tokenizer.encode(text) for text in config.input.prompts]
    # Read before anything is decoded, so that a mistake in them does not come late.
    canvases = [parse_infill(text, tokenizer, mask) for text in config.input.infills]
    seed = config.input.seed
    if prompts:
        is_new = [[False] * len(ids) + [True] * new for ids in prompts]
        yield _Batch("prompt", config.input.prompts, prompts, is_new, list(range(seed, seed + len(prompts))))
    seed += len(prompts)
    if canvases:
        is_new = [[token == mask for token in ids] for ids in canvases]
        yield _Batch("infill", config.input.infills, canvases, is_new, list(range(seed, seed + len(canvases))))


def _print(
    config: InferConfig, tokenizer: Tokenizer, batch: _Batch, index: int, result: Generation, seconds: float
) -> None:
    """One request; ``seconds`` are those of its batch."""
    if config.output.format == "json":
        record = {
            batch.kind: batch.texts[index],
            "text": tokenizer.decode(result.token_ids),
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "num_forwards": result.num_forwards,
            "logprobs": result.logprobs,
            "step_map": result.step_map,
            "seed": batch.seeds[index],
            "seconds": round(seconds, 6),
        }
        print(json.dumps(record), flush=True)
        return
    if len(config.input.prompts) + len(config.input.infills) > 1:
        print(_styled(f"[{batch.kind} {index + 1}]", DIM))
    print("".join(_styled(text, "" if new else DIM) for text, new in _final_pieces(tokenizer, batch, index, result)))


def _final_pieces(tokenizer: Tokenizer, batch: _Batch, index: int, result: Generation) -> list[tuple[str, bool]]:
    from diffusionlm.inference.text import canvas_pieces

    if batch.kind == "prompt":
        return [(batch.texts[index], False), (tokenizer.decode(result.token_ids), True)]
    nothing_masked = [False] * len(result.token_ids)
    return canvas_pieces(result.token_ids, nothing_masked, batch.is_new[index], tokenizer)


def _styled(text: str, style: str) -> str:
    """The text as it is, or, in a terminal, with a style and without characters that would command it."""
    if not sys.stdout.isatty():
        return text
    text = _printable(text)
    return f"{style}{text}{PLAIN}" if style and text and "NO_COLOR" not in os.environ else text


def _printable(text: str) -> str:
    """Without control characters: tabs become spaces, others a replacement; newlines stay."""
    text = text.replace("\t", "    ")
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char != "\n" else char for char in text)


class _LiveView:
    """Shows the canvases after each forward: redrawn in a terminal, else one line for each that changed."""

    def __init__(self, tokenizer: Tokenizer, batch: _Batch, output_format: str) -> None:
        self._tokenizer = tokenizer
        self._batch = batch
        self._stream: TextIO = sys.stderr if output_format == "json" else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._lines_shown = 0
        self._canvases: tuple[Canvas, ...] = ()

    def __call__(self, step: Step) -> None:
        if self._is_terminal:
            self._redraw(step)
        else:
            self._append(step)
        self._canvases = step.canvases
        self._stream.flush()

    def close(self) -> None:
        """Take the drawing away, for the final text to stand in its place."""
        if self._lines_shown:
            self._stream.write(f"\x1b[{self._lines_shown}A\r\x1b[J")
            self._lines_shown = 0

    def _append(self, step: Step) -> None:
        from diffusionlm.inference.text import render_canvas

        for index, canvas in enumerate(step.canvases):
            if self._canvases and self._canvases[index] == canvas:
                continue
            text = render_canvas(canvas.token_ids, canvas.is_masked, self._tokenizer)
            request = f"{self._batch.kind} {index + 1}, forward {step.num_forwards}"
            self._stream.write(f"{request}: {json.dumps(text, ensure_ascii=False)}\n")

    def _redraw(self, step: Step) -> None:
        from diffusionlm.inference.text import canvas_pieces

        width, height = shutil.get_terminal_size()
        lines = [f"forward {step.num_forwards}"]
        for canvas, is_new in zip(step.canvases, self._batch.is_new, strict=True):
            lines += wrapped(canvas_pieces(canvas.token_ids, canvas.is_masked, is_new, self._tokenizer), width)
        # Of what does not fit the end is shown: the terminal cannot go back further than its top line.
        lines = lines[-(height - 1) :]
        self.close()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._lines_shown = len(lines)


def wrapped(pieces: Sequence[tuple[str, bool]], width: int) -> list[str]:
    """Lines that fit a terminal of so many columns, what is not new dimmed."""
    rows: list[list[tuple[str, bool]]] = [[]]
    column = 0
    for text, new in pieces:
        for char in _printable(text):
            wide = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if char == "\n" or column + wide > width:
                rows.append([])
                column = 0
            if char != "\n":
                rows[-1].append((char, new))
                column += wide
    return ["".join(_colored(run, new) for new, run in groupby(row, key=lambda item: item[1])) for row in rows]


def _colored(run: Iterable[tuple[str, bool]], new: bool) -> str:
    text = "".join(char for char, _ in run)
    return text if new or "NO_COLOR" in os.environ else f"{DIM}{text}{PLAIN}"


if __name__ == "__main__":
    main()
