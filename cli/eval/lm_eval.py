"""``diffusionlm-lm-eval``: the command line of lm-evaluation-harness, with the models of this project."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.entry import build_parser, friendly_errors, require_extra, usage_errors
from config.evaluation.lm_eval import LmEvalConfig, nest_arguments
from config.load import validate_config

NAME = "diffusionlm-lm-eval"
MODEL = "diffusionlm"
DESCRIPTION = """Evaluate a model with lm-evaluation-harness (extra "lm-eval").

All arguments are those of lm-eval 0.4, with three differences: --model is "diffusionlm" if it is not given, answers are
decoded 16 at a time if --batch_size is not given, and --use_cache names a folder, in which each model with its settings
has a file of its own. `diffusionlm-lm-eval run --help` lists the arguments.

--model_args path=DIR names the model. Its other keys are those of LmEvalConfig, such as generation.steps,
generation.block_length, likelihood.num_mc_samples or seed."""
EXAMPLE = f"""  {NAME} --model_args path=runs/quickstart --include_path config/resources/lm_eval --tasks own_choice
  {NAME} --model_args path=DIR generation.block_length=32 generation.steps=256 --tasks gsm8k --limit 50"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "--version"):
        parser = build_parser(NAME, DESCRIPTION, EXAMPLE)
        parser.parse_args(words)
        parser.print_help()
        return
    require_extra("lm-eval", "lm_eval")
    from lm_eval._cli.harness import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    harness, argv = HarnessCLI(), sys.argv
    sys.argv = [NAME, *words]  # the harness reads the arguments of the process
    try:
        arguments = harness.parse_args()
    finally:
        sys.argv = argv
    if arguments.command == "run":
        with usage_errors():
            _prepare_run(arguments)
        # Imported before any model is looked up; it registers ours.
        importlib.import_module("diffusionlm.evaluation.lm_eval.adapter")
    harness.execute(arguments)


def _prepare_run(arguments: argparse.Namespace) -> None:
    """Set what the command line leaves open, and check the arguments of our model before anything is loaded."""
    if arguments.config is not None:  # a YAML file may have the model and its arguments
        return
    arguments.model = arguments.model or MODEL
    if arguments.model != MODEL:
        return
    values: dict[str, Any] = arguments.model_args or {}
    config = validate_config(LmEvalConfig, nest_arguments(values), "--model_args")
    if config.model.path is None:
        raise ValueError("no model: add --model_args path=DIR")
    if not hasattr(arguments, "batch_size"):
        arguments.batch_size = "auto"
    if arguments.use_cache is not None:
        arguments.use_cache = str(Path(arguments.use_cache) / _fingerprint(config) / "requests")


def _fingerprint(config: LmEvalConfig) -> str:
    """Hash of the model's files and the settings."""
    import hashlib

    from cli.pipeline.stamps import FileHashes

    hashes = FileHashes()
    paths = [path for path in (config.model.path, config.model.adapter) if path is not None]
    parts = [config.model_dump_json(exclude={"batch_size"}), *(hashes.hash_model(str(path)) for path in paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
