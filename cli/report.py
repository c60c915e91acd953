"""``diffusionlm-report``: a page of one run, or of several side by side; also of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.entry import build_parser, friendly_errors, path_argument
from cli.eval.report import build_page, is_evaluation, read_evaluations
from files.terminal_text import print_line
from files.usage_error import UsageError
from logger.pages.html import write_page
from logger.pages.terminal import print_parts
from logger.report import write_report

NAME = "diffusionlm-report"

EXAMPLE = f"""  {NAME} runs/quickstart
  {NAME} runs/quickstart runs/blocks --output compared.html
  {NAME} results/llada results/dream --output compared.html"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    """Parse, read the runs, write the page. A run that cannot be reported ends it with 2."""
    description = (
        "Curves, results, config and samples of runs on one page, which needs no network; of evaluations (folders of "
        "diffusionlm-eval) accuracies, paired comparisons, the speed-quality curve and answers, also as Markdown."
    )
    parser = build_parser(NAME, description, EXAMPLE)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=path_argument, help="directory of a run or of an evaluation"
    )
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        type=path_argument,
        help="the page; without it report.html in the directory of the run, of several in the working directory",
    )
    arguments = parser.parse_args(argv)
    first: Path = arguments.runs[0]
    is_alone = len({path.resolve() for path in arguments.runs}) == 1
    output: Path = arguments.output or (first / "report.html" if is_alone else Path("report.html"))
    if output.suffix != ".html":
        raise UsageError(f"--output {output}: name a file that ends in .html")
    write = _write_evaluations if is_evaluation(first) else _write_runs
    try:
        write(arguments.runs, output)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _write_runs(paths: Sequence[Path], output: Path) -> None:
    runs = write_report(paths, output)
    for run in runs:
        for note in run.notes:
            print_line(f"{run.name}: {note}")
    print_line(f"{output} shows {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}")


def _write_evaluations(paths: Sequence[Path], output: Path) -> None:
    report = read_evaluations(paths)
    write_page(build_page(report), output)
    print_parts([*report.notes, f"{output} and {output.with_suffix('.md').name} show {report.title}"])
