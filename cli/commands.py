"""All commands: each is a program of its own, ``diffusionlm-NAME``, and a word behind ``diffusionlm``.

A command's module is imported by its call, so that Ctrl-C during the import ends it without a traceback.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from cli.entry import build_parser, friendly_errors

NAME = "diffusionlm"


@dataclass(frozen=True)
class Command:
    """A command, which is called with its arguments (None: those of the process) and returns its exit code."""

    name: str
    module: str
    summary: str
    function: str = "main"
    """Of the module."""

    @property
    def program(self) -> str:
        return f"{NAME}-{self.name}"

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        return friendly_errors(self.program)(self._run)(argv)

    def _run(self, argv: Sequence[str] | None) -> int:
        code: int | None = getattr(importlib.import_module(self.module), self.function)(argv)
        return code or 0


train = Command("train", "cli.train", "train a model")
train_ddp = Command("train-ddp", "cli.train_ddp", "train a model on several ranks, of one machine or of several")
rl = Command("rl", "cli.train", "reinforcement learning: rewards for answers that the model writes", "reinforce")
infer = Command("infer", "cli.infer", "continue prompts, answer chats and fill masked spans")
serve = Command("serve", "cli.serve", "a server with the API of OpenAI")
evaluate = Command("eval", "cli.eval", "likelihood of a text under a model")
lm_eval = Command("lm-eval", "cli.eval.lm_eval", "tasks of lm-evaluation-harness with a model")
train_tokenizer = Command("train-tokenizer", "cli.train_tokenizer", "train a byte-level BPE tokenizer")
make_data = Command("make-data", "cli.make_data", "tokenize text into shards")
data = Command("data", "cli.data", "show the rows of a training run: prompts, targets, what is left out")
convert = Command("convert", "cli.convert", "write a model with another dtype or family, or for diffusion")
analyze = Command("analyze", "cli.analyze", "describe a model directory, or compare two")
report = Command("report", "cli.report", "a page of one run, or of several side by side")
sweep = Command("sweep", "cli.sweep", "training runs of many configs")
pipeline = Command("pipeline", "cli.pipeline", "stages of training, conversion and evaluation, each run once")
doctor = Command("doctor", "cli.doctor", "what is broken or slow on this machine")
bench_train = Command("bench-train", "cli.bench", "training speed", "train")
bench_infer = Command("bench-infer", "cli.bench", "decoding speed", "infer")
bench_serve = Command("bench-serve", "cli.bench", "latency and throughput of a server under load", "serve")
bench_tokenizer = Command("bench-tokenizer", "cli.bench", "speed of the tokenizer", "tokenizer")

COMMANDS = {command.name: command for command in list(globals().values()) if isinstance(command, Command)}
"""Name -> command."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments. Returns its exit code."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values()]
    parser = build_parser(
        NAME,
        "\n".join(["Train, run and measure diffusion language models.", "", "commands:", *lines]),
        f"  {NAME} train --config config/resources/train.toml\n  {NAME} train --help",
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    arguments = parser.parse_args(argv)
    return COMMANDS[arguments.command](arguments.arguments)
