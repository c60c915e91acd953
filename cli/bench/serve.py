"""``diffusionlm-bench-serve``: latency and throughput of a server under load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli.arguments import add_shorthand, parse_command
from cli.entry import friendly_errors
from cli.tables import make_table, print_parts
from config.bench.serve import BenchServeConfig
from logger.pages import Part

NAME = "diffusionlm-bench-serve"

EXAMPLE = f"""  {NAME} --concurrency 8
  {NAME} --url http://127.0.0.1:8000/v1 --rate 2 --set requests.file=prompts.jsonl --set goodput.ttft=500
  {NAME} --concurrency 32 --set requests.count=200 --set output.path=runs/load.json"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchServeConfig,
        name=NAME,
        description="Send requests to an OpenAI-compatible server, measure them, and check the answers.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    from benchmarking.serving.bench_serve import bench_serve
    from benchmarking.serving.summary import format_summary

    result = bench_serve(config)
    rows, distributions = format_summary(result.summary, config.goodput)
    columns = range(1, len(distributions[0]))
    parts: list[Part] = [
        make_table([["model", result.model], *rows]),
        "",
        make_table(distributions, right=columns, has_header=True),
    ]
    print_parts(parts)
    if result.problems:
        raise ValueError("; ".join(result.problems))


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shorthands for --set")
    add_shorthand(group, "--url", "server.url={string}", metavar="URL", help="the server, up to its version")
    add_shorthand(
        group, "--model", "server.model={string}", metavar="NAME", help="else the first that the server lists"
    )
    add_shorthand(group, "--concurrency", "load.concurrency={text}", metavar="N", help="requests under way at most")
    add_shorthand(group, "--rate", "load.rate={text}", metavar="RATE", help="requests per second, at random times")


if __name__ == "__main__":
    main()
