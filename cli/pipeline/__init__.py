"""``diffusionlm-pipeline``: stages of training, conversion, evaluation and sampling, each run once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import friendly_errors, print_error, require_extra, usage_errors
from cli.serve import EXTRA, prepare, serve
from config.finetune.pipeline import PAGE, PipelineConfig
from config.serving.server import ServeConfig
from files.lock import DirectoryInUseError, lock_directory
from files.terminal_text import print_message
from files.usage_error import UsageError

if TYPE_CHECKING:
    from cli.pipeline.stamps import StageState

NAME = "diffusionlm-pipeline"

EXAMPLE = f"""  {NAME} --config config/resources/pipeline.toml --dry-run
  {NAME} --config config/resources/pipeline.toml
  {NAME} --config config/resources/pipeline.toml --until tune
  {NAME} --config config/resources/pipeline.toml --serve

The same command continues an interrupted pipeline. Stages that are done are not run again."""

LOCK_TIMEOUT_SECONDS = 10.0
"""A stage ends this soon after a pipeline that was killed."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a pipeline. Returns 0, 1 if a stage failed, 2 if nothing was started, or 128 + the signal that ended it."""
    config, arguments = parse_command(
        PipelineConfig,
        name=NAME,
        description="Run stages of training, conversion, evaluation and sampling, each once, and report on all.",
        example=EXAMPLE,
        add_arguments=_add_arguments,
        argv=argv,
    )
    if arguments.serve:
        require_extra(*EXTRA)
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from cli.pipeline.report import describe_states, write_report
    from cli.pipeline.runner import run_stages
    from cli.pipeline.stages import build_server, build_stages
    from cli.pipeline.stamps import read_states
    from logger.pages.terminal import print_parts

    with usage_errors():
        stages = build_stages(config)
        if arguments.dry_run:
            states = select_states(read_states(stages), arguments)
            if arguments.serve:
                build_server(config, [state.stage for state in states])
            print_parts(describe_states(states))
            return 0
    try:
        with lock_directory(config.directory, LOCK_TIMEOUT_SECONDS) as lock:
            with usage_errors():
                all_states = read_states(stages)
                states = select_states(all_states, arguments)
                check_startable(states, all_states, arguments.force)
                server = build_server(config, [state.stage for state in states]) if arguments.serve else None
            code, reason = run_stages(states, lock, lambda: write_report(config.directory, stages))
            if code != 0:
                page = config.directory / PAGE
                print_error(NAME, f"{reason}; the same command goes on from there. Results so far: {page}")
                return code
            report = write_report(config.directory, stages)
    except DirectoryInUseError:
        raise UsageError(f"directory = {config.directory} is in use by another pipeline: wait or stop it") from None
    print_parts(report)
    if server is not None:
        serve_model(server)
    return 0


def serve_model(config: ServeConfig) -> None:
    """Serve a model until Ctrl-C, and print where its page is."""
    with usage_errors():
        preparer, keys, bound = prepare(config)
    from diffusionlm.serving.http.access import format_url

    url = format_url(config.serve.host, bound.getsockname()[1])
    print_message(f"open {url}/{'#chat' if preparer.has_chat else ''} in a browser; Ctrl-C ends the server")
    serve(config, preparer, keys, bound)


def select_states(states: Sequence[StageState], arguments: argparse.Namespace) -> list[StageState]:
    """Return the stages that ``--only`` or ``--until`` selects.

    Raises:
        ValueError: there is no such stage.
    """
    names = [state.stage.name for state in states]
    for option in ("only", "until"):
        name = getattr(arguments, option)
        if name is not None and name not in names:
            raise ValueError(f"--{option} {name}: there is no such stage; there are {', '.join(names)}")
    if arguments.only is not None:
        return [states[names.index(arguments.only)]]
    return list(states if arguments.until is None else states[: names.index(arguments.until) + 1])


def check_startable(selected: Sequence[StageState], states: Sequence[StageState], force: bool) -> None:
    """Check that no stage would replace results unasked, and that the input of a single one is done.

    Raises:
        ValueError: one would, or it is not.
    """
    stale = [state for state in selected if state.action == "stale"]
    if stale and not force:
        lines = [f'\n  stage "{state.stage.name}": {state.reason}' for state in stale]
        raise ValueError(
            f"these stages have results of something else:{''.join(lines)}\n--force removes the results and runs them "
            "again; another name or directory keeps them"
        )
    names, done = (
        {state.stage.name for state in selected},
        {state.stage.name for state in states if state.action == "skip"},
    )
    for state in selected:
        parent = state.stage.parent
        if parent is not None and parent.name not in names | done:
            raise ValueError(
                f'stage "{state.stage.name}" starts from stage "{parent.name}", which is not done: run it first'
            )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--only", metavar="STAGE", help="run this stage; the one that it starts from must be done")
    selection.add_argument("--until", metavar="STAGE", help="run the stages up to this one")
    parser.add_argument("--force", action="store_true", help="run stages anew whose config, data or input has changed")
    text = "at the end serve the last model, with a page for the browser: a chat, if it has a template"
    parser.add_argument("--serve", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what each stage would do, and why, and exit")
