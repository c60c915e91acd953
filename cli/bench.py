"""The benchmarks' commands: ``diffusionlm-bench-train``, ``-bench-infer``, ``-bench-serve``, ``-bench-tokenizer``."""

from __future__ import annotations

from collections.abc import Sequence

from cli.arguments import Shorthand, parse_command
from config.bench.inference import BenchInferConfig
from config.bench.serve import BenchServeConfig
from config.bench.training import BenchTokenizerConfig, BenchTrainConfig
from logger.pages.terminal import list_parts, print_parts

TRAIN, INFER = "diffusionlm-bench-train", "diffusionlm-bench-infer"
SERVE, TOKENIZER = "diffusionlm-bench-serve", "diffusionlm-bench-tokenizer"


def train(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchTrainConfig,
        name=TRAIN,
        description="Measure training tokens per second and memory, in turn with peers.",
        example=f"  {TRAIN} --config config/resources/bench_train.toml --set output.directory=runs/bench_train",
        argv=argv,
    )
    # Here and below only now, so that --help and config errors do not wait for torch.
    from benchmarking.bench_train import bench_train

    print_parts(list_parts(bench_train(config)))


def infer(argv: Sequence[str] | None = None) -> None:
    resource = "config/resources/bench_infer.toml"
    config, _ = parse_command(
        BenchInferConfig,
        name=INFER,
        description="Measure tokens per second, forwards and memory of decoding, all cells of a grid in turn.",
        example=f"""  {INFER} --config {resource} --set output.path=runs/bench_infer.json
  {INFER} --config {resource} --model runs/blocks/4 --set bench.memory=false""",
        shorthands=[Shorthand("--model", "DIR", "model.path={string}", "in place of random weights")],
        argv=argv,
    )
    from benchmarking.bench_infer import bench_infer

    print_parts(list_parts(bench_infer(config)))


def serve(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchServeConfig,
        name=SERVE,
        description="Send requests to an OpenAI-compatible server, measure them, and check the answers.",
        example=f"""  {SERVE} --concurrency 8
  {SERVE} --url http://127.0.0.1:8000/v1 --rate 2 --set requests.file=prompts.jsonl --set goodput.ttft=500
  {SERVE} --concurrency 32 --set requests.count=200 --set output.path=runs/load.json""",
        config_required=False,
        shorthands=[
            Shorthand("--url", "URL", "server.url={string}", "the server, up to its version"),
            Shorthand("--model", "NAME", "server.model={string}", "else the first that the server lists"),
            Shorthand("--concurrency", "N", "load.concurrency={text}", "requests under way at most"),
            Shorthand("--rate", "RATE", "load.rate={text}", "requests per second, at random times"),
        ],
        argv=argv,
    )
    from benchmarking.serving.bench_serve import bench_serve
    from benchmarking.serving.summary import format_summary

    result = bench_serve(config)
    print_parts(format_summary(result.model, result.summary, config.goodput))
    if result.problems:
        raise ValueError("; ".join(result.problems))


def tokenizer(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchTokenizerConfig,
        name=TOKENIZER,
        description="Measure megabytes per CPU-second of training, encoding and decoding, round by round with peers.",
        example=f"  {TOKENIZER} --config config/resources/bench_tokenizer.toml --set output.directory=runs/bench",
        argv=argv,
    )
    from benchmarking.bench_tokenizer import bench_tokenizer

    print_parts(list_parts(bench_tokenizer(config)))
