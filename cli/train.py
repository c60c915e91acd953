"""``diffusionlm-train``: train a model from a TOML config."""

from __future__ import annotations

import math
import os
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import friendly_errors, memory_errors, usage_errors
from config.train import TrainConfig
from config.training.parallel import SingleProcess
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from files.paths import check_can_write
from files.resilient_stream import resilient
from files.terminal_text import print_message
from files.usage_error import UsageError, prefix_errors
from logger.pages import Part, Table
from logger.pages.terminal import print_parts
from profiling.adapter_size import check_targets
from profiling.estimate import REFERENCE_GPU, estimate_run
from profiling.flops import count_vision_parameters
from profiling.machine import read_memory
from profiling.torch_setup import drivers

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizer import Tokenizer

NAME = "diffusionlm-train"
RL_NAME = "diffusionlm-rl"

KEYS = "--print-config prints all keys, --schema what they mean; config/resources/ has configs to begin with"

LOCAL_SOURCES = ("files", "shards", "chat_tasks")
"""Kinds of sources that are opened before a run begins; others need a network or seconds."""

MEMORY_REMEDY = (
    "lower training.micro_batch_size, training.batch_size or data.row_length, or set "
    'runtime.activation_checkpointing = "full"; --dry-run shows the parts'
)
REFUSED_MEMORY_RATIO = 10
"""A run that is estimated to need so many times the memory of the machine is refused; the estimate is a rough one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load the config, train. Returns the exit code: 128 + signal if a signal stopped the run.

    Under torchrun this is one rank of several. Only rank 0 reports errors of the command line, and a run that a signal
    stopped returns 0, since torchrun would restart a failed one.
    """
    example = f"{NAME} --config config/resources/train.toml --set training.max_steps=200"
    return _run(argv, NAME, "Train a masked diffusion language model.", example)


def reinforce(argv: Sequence[str] | None = None) -> int:
    """Like `main`, for a config with [rl]."""
    description = "Reinforce a model: it answers prompts, and answers with rewards become more likely."
    return _run(argv, RL_NAME, description, f"{RL_NAME} --config config/resources/rl_addition.toml")


def _run(argv: Sequence[str] | None, name: str, description: str, example: str) -> int:
    with friendly_errors(name if is_first_rank() else f"{name}, rank {os.environ['RANK']}"):
        with redirect_stderr(sys.stderr if is_first_rank() else StringIO()):
            config, arguments = parse_command(
                TrainConfig,
                name=name,
                description=description,
                example=f"{example}\n\n{KEYS}",
                add_arguments=add_arguments,
                argv=argv,
            )
            if name == RL_NAME and config.rl is None:
                raise UsageError("[rl] is missing: add [rl.prompts], the task whose answers get rewards (docs/rl.md)")
        if is_first_rank():
            prepare(config, is_dry_run=arguments.dry_run)
        if arguments.dry_run:
            return 0
        code = train_as_rank(config)
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code
    return 1


def prepare(config: TrainConfig, ranks: int = 1, *, is_dry_run: bool) -> None:
    """Check the files of a run; of a dry run print what it needs on each of ``ranks`` ranks.

    Raises:
        UsageError: a file or the config is wrong.
    """
    with usage_errors():
        if not is_dry_run:
            check_files(config)
            return
        estimate = format_run_estimate(config, ranks)
    print_parts([estimate])


def check_files(config: TrainConfig) -> None:
    """Check what a run reads and writes, before its directory is made.

    Raises:
        ValueError: a file is missing or unreadable, or the run directory cannot be written; names the key.
    """
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from diffusionlm.checkpoints.model_files import list_weight_files, load_tokenizer
    from diffusionlm.data.chat.templates import resolve_chat_template
    from diffusionlm.data.pipeline import open_components

    directory, init_from = config.run.directory, config.model.init_from
    check_can_write(directory, f"run.directory = {directory}")
    resolved, tokenizer = check_model(config)
    if init_from is not None:
        with prefix_errors(f"model.init_from = {init_from}"):
            list_weight_files(resolve_model_directory(init_from))
            tokenizer = tokenizer or load_tokenizer(init_from)
    components = open_components(config.data, "train", LOCAL_SOURCES)
    for chat in [component.chat for component in components if component.chat is not None]:
        if not (directory / "tokenizer").is_dir():
            resolve_chat_template(chat.config, tokenizer, chat.key)
    check_memory(resolved)


def check_model(config: TrainConfig) -> tuple[TrainConfig, Tokenizer | None]:
    """Check that base, tokenizer, adapter and config fit, without weights.

    Returns:
        The config with the size of the model's vocabulary as `tokenizer.vocab_size`, and the tokenizer of the run
        directory, of `tokenizer.path` or of the shards. None: it is the base's, or will be trained and may get fewer
        tokens.

    Raises:
        ValueError: they do not fit, or one cannot be read; names the key.
    """
    from diffusionlm.checkpoints.adapter_config import read_adapter_config
    from diffusionlm.checkpoints.model_files import load_tokenizer
    from diffusionlm.data.pipeline import open_components
    from diffusionlm.data.shards import ShardDocuments

    init_from, lora, directory = config.model.init_from, config.lora, config.run.directory / "tokenizer"
    is_new = not directory.is_dir()
    key, path = ("tokenizer.path", config.tokenizer.path) if is_new else ("run.directory", directory)
    if path is None and init_from is None:
        sources = [component.source for component in open_components(config.data, "train", ("shards",))]
        path = next((source.tokenizer_directory for source in sources if isinstance(source, ShardDocuments)), None)
    with prefix_errors(f"{key} = {path}"):
        tokenizer = None if path is None else load_tokenizer(path)
    size = config.tokenizer.vocab_size if tokenizer is None else tokenizer.vocab_size
    if init_from is not None:
        with prefix_errors(f"model.init_from = {init_from}"):
            base = read_model_config(resolve_model_directory(init_from, needs_weights=False))
        config.model.check_same_architecture(base)
        if is_new and tokenizer is not None:
            config.model.check_vocab_size(base, size)
        size = base.vocab_size
    if lora is not None:
        lora.check_token_ids(size)
        check_targets(lora, config.model.to_adapted_config(vocab_size=size))
        if lora.init_from is not None:
            with prefix_errors(f"lora.init_from = {lora.init_from}"):
                read_adapter_config(lora.init_from)
    resolved = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"vocab_size": size})})
    return resolved, tokenizer


def check_memory(config: TrainConfig) -> None:
    """Warn before the work if a run on the CPU is estimated to need more memory than is free.

    Raises:
        ValueError: a run of one process needs many times what the machine has.
    """
    if "WORLD_SIZE" in os.environ or config.run.device == "cuda" or (config.run.device == "auto" and drivers()):
        return
    memory, needed = read_memory(), estimate_run(config).bytes_total
    message = f"the run needs about {_format_bytes(needed)} of memory"
    if isinstance(config.parallel, SingleProcess) and needed > REFUSED_MEMORY_RATIO * (memory.total or math.inf):
        raise ValueError(f"{message}, and this machine has {_format_bytes(memory.total or 0)}: {MEMORY_REMEDY}")
    if memory.free is not None and needed > memory.free:
        print_message(f"{NAME}: warning: {message}, and {_format_bytes(memory.free)} are free: {MEMORY_REMEDY}")


def train_as_rank(config: TrainConfig) -> int:
    """Train, print the summary on the first rank, and return the exit code. `diffusionlm-train-ddp` starts this in each
    process.

    A run goes on, and succeeds, if the readers of its output go away: its directory has everything.
    """
    # Imported here, so that --help and config errors do not wait for torch.
    from diffusionlm.rl.run import reinforce_policy
    from diffusionlm.training.loop import train

    with memory_errors(MEMORY_REMEDY), redirect_stderr(resilient(sys.stderr)):
        result = train(config) if config.rl is None else reinforce_policy(config)
        if result.summary is not None and is_first_rank():
            # With logging.console = "json" standard output is for programs.
            output = sys.stderr if config.logging.console == "json" else resilient(sys.stdout)
            parts = format_summary(config.run.directory, result.example_input, is_chat=config.data.has_only_chats)
            print_parts(parts, output)
    return 0 if result.stop_signal is None else 128 + result.stop_signal


def is_first_rank() -> bool:
    """Return whether this process is the only one, or rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


def format_run_estimate(config: TrainConfig, ranks: int = 1) -> Part:
    """Format a table of parameters, tokens, FLOPs and memory for ``--dry-run``.

    Raises:
        ValueError: `training.batch_size` is not a multiple of ``ranks``, or `check_model` refuses the config.
    """
    config, tokenizer = check_model(config)
    is_vocab_known = tokenizer is not None or config.model.init_from is not None
    assumed = "" if is_vocab_known else " assumed; the tokenizer that is trained decides"
    estimate = estimate_run(config, ranks)
    tokens, trained = estimate.tokens, estimate.trained_parameters
    vision = count_vision_parameters(config.model)
    lines = [
        ("parameters", f"{estimate.parameters:,} ({estimate.embedding_parameters:,} in embedding and head)"),
        *([("of them for images", "{:,} in the tower, {:,} in its mergers".format(*vision))] if sum(vision) else []),
        *([("trained", f"{trained:,} ({trained / estimate.parameters:.2%})")] if config.lora else []),
        *([("of them active", f"{estimate.active_parameters:,} for each token")] if config.model.num_experts else []),
        ("vocabulary", f"{config.tokenizer.vocab_size:,} tokens{assumed}"),
        ("tokens per step", f"{estimate.tokens_per_step:,} ({config.training.batch_size} rows of {config.row_length})"),
        ("tokens", "by the data: epochs are counted first" if tokens is None else f"{tokens:,}"),
        ("FLOPs per token", f"{estimate.flops_per_token / 1e6:,.1f} M, forward and backward"),
    ]
    if tokens is not None:
        lines.append(("FLOPs", f"{tokens * estimate.flops_per_token / 1e12:,.1f} T"))
    if ranks > 1:
        lines.append(("ranks", f"{ranks}; memory and traffic are those of each"))
        lines.append(("sent per step", _format_bytes(estimate.bytes_sent)))
        if estimate.model_bytes_sent:
            lines.append(("sent for the mesh", _format_bytes(estimate.model_bytes_sent)))
        lines.append((f"on {REFERENCE_GPU}", f"at least {estimate.step_seconds_bound:.3g} s per step"))
    lines += [
        ("memory, weights", _format_bytes(estimate.bytes_weights)),
        ("memory, gradients", _format_bytes(estimate.bytes_gradients)),
        ("memory, optimizer", _format_bytes(estimate.bytes_optimizer)),
        ("memory, activations", f"{_format_bytes(estimate.bytes_activations)} (estimate)"),
        ("memory, together", f"{_format_bytes(estimate.bytes_total)} (estimate)"),
    ]
    return Table((), [*lines, *([] if config.rl is None else _format_rollouts(config, ranks))])


def _format_rollouts(config: TrainConfig, ranks: int) -> list[tuple[str, str]]:
    """What an update with rollouts takes; the lines of activations above are those of a micro-batch of rows."""
    from profiling.rollouts import GPU, estimate_rollouts

    estimate = estimate_rollouts(config, ranks)
    return [
        ("answers of an update", f"{estimate.answers:,} on a rank"),
        ("forwards of an answer", f"{estimate.forwards:,} at most, decoded"),
        ("rows of an answer", f"{estimate.rows:,} at most, scored"),
        ("memory, cache", _format_bytes(estimate.cache_bytes)),
        (f"rollout on {GPU}", f"at least {estimate.rollout_seconds:,.3g} s"),
        (f"scoring on {GPU}", f"at least {estimate.scoring_seconds:,.3g} s"),
    ]


def _format_bytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of both training commands."""
    parser.add_argument("--dry-run", action="store_true", help="show parameters, tokens, memory and FLOPs, and exit")


def format_summary(directory: Path, example_input: str = "", *, is_chat: bool = False) -> list[Part]:
    """The results of a finished run, and the command that tries the model with ``example_input``.

    Args:
        example_input: a text with masked spans, a prompt, or a question.
        is_chat: it is a question of a chat.
    """
    from logger.report import read_run
    from logger.report.page import tabulate_results

    run = read_run(directory)
    bound, entropy = run.result("evaluation", "nats_per_token"), run.result("evaluation", "unigram_entropy")
    notes = []
    if bound is not None and entropy is not None and bound > entropy:
        notes = ["", "the model is not yet better than the frequencies of tokens: train longer (training.max_steps)"]
    command = suggest_next_command(directory, example_input, is_chat=is_chat)
    return [tabulate_results([run]), *notes, "", f"next: {command}"]


def suggest_next_command(directory: Path, example_input: str, *, is_chat: bool = False) -> str:
    """The command that answers a question, else fills the masked spans of a text, or continues it if it has none."""
    option = "--chat" if is_chat else "--infill" if "[MASK:" in example_input else "--prompt"
    separator = "=" if example_input.startswith("-") else " "  # else the text would be read as an option
    escaped_text = example_input.replace("\\", "\\\\").replace("\n", "\\n")  # the command reads \n as a line break
    return (
        f"uv run diffusionlm-infer --model {shlex.quote(str(directory))} {option}{separator}{shlex.quote(escaped_text)}"
    )


if __name__ == "__main__":
    sys.exit(main())
