"""``diffusionlm-train-ddp``: train a model on several ranks of this machine, or of several machines."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from cli.arguments import parse_command, positive_int
from cli.entry import friendly_errors, usage_errors
from cli.train import KEYS, add_arguments, prepare, train_as_rank
from config.train import DistributedTrainConfig
from files.usage_error import UsageError

NAME = "diffusionlm-train-ddp"

EXAMPLE = f"""  {NAME} --config config/resources/train_ddp.toml
  {NAME} --config config/resources/train_ddp.toml --set parallel.strategy=fsdp --set parallel.local_ranks=8
  {NAME} --config train.toml --nodes 4 --rendezvous node1:29400      # on each of four machines

{KEYS}"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load the config, start the ranks. Returns the exit code: 128 + signal where one ended the run."""
    config, arguments = parse_command(
        DistributedTrainConfig,
        name=NAME,
        description="Train a masked diffusion language model on several ranks: one for each GPU, or two on a CPU.",
        example=EXAMPLE,
        add_arguments=_add_arguments,
        argv=argv,
    )
    if arguments.nodes > 1 and ":" not in (arguments.rendezvous or ""):
        raise UsageError(
            f"--nodes {arguments.nodes} needs a rendezvous address: add --rendezvous HOST:PORT, HOST being "
            "one of them, the same on all"
        )
    # Two, where only torch knows how many GPUs there are.
    local_ranks = 2 if config.parallel.local_ranks == "auto" else config.parallel.local_ranks
    prepare(config.to_train_config(), local_ranks * arguments.nodes, is_dry_run=arguments.dry_run)
    if arguments.dry_run:
        return 0
    # Only now, so that no error before waits for torch.
    from ddp.launch import Nodes, count_local_ranks, launch

    nodes = Nodes(arguments.nodes, arguments.rendezvous or "localhost:0", str(config.run.directory))
    with usage_errors():
        local_ranks = count_local_ranks(config.parallel, config.run.device)
        config.parallel.check_ranks(local_ranks * nodes.count)
        config.sequences_per_rank(local_ranks * nodes.count // config.parallel.ranks_of_data)
    restarts = config.parallel.max_restarts
    act = partial(train_as_rank, config.to_train_config())
    return launch(act, local_ranks, name=NAME, max_restarts=restarts, nodes=nodes)


def _add_arguments(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--nodes", type=positive_int, default=1, help="machines that run this command (default: 1)")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="where several machines meet: one of them, a free port"
    )
