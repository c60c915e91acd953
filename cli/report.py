"""``diffusionlm-report``: a page of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.entry import build_parser, exit_with_usage_error, friendly_errors, path_argument
from files.terminal_text import print_line
from logger.report import write_report

NAME = "diffusionlm-report"

EXAMPLE = f"""  {NAME} runs/quickstart
  {NAME} runs/quickstart runs/blocks --output compared.html"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    """Parse, read the runs, write the page. A run that cannot be reported ends it with 2."""
    description = "Curves, results, config and samples of runs on one page, which needs no network."
    parser = build_parser(NAME, description, EXAMPLE)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=path_argument, help="directory of a run, such as runs/quickstart"
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
        exit_with_usage_error(NAME, f"--output {output}: name a file that ends in .html")
    try:
        runs = write_report(arguments.runs, output)
    except ValueError as error:
        exit_with_usage_error(NAME, str(error))
    for run in runs:
        for note in run.notes:
            print_line(f"{run.name}: {note}")
    print_line(f"{output} shows {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}")


if __name__ == "__main__":
    main()
