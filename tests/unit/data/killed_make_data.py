"""A program that makes data and is killed at one step after the other. The continuation must give the same files.

Arguments: the config as JSON, a directory for the reference.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.make_data import MakeDataConfig
from diffusionlm.data import make_data as module
from diffusionlm.data.shard_files import ShardWriter

values, reference = json.loads(sys.argv[1]), Path(sys.argv[2])
module.CHUNK_DOCUMENTS = 3
config = MakeDataConfig.model_validate(values)
directory = config.output.directory
# This also imports all modules, once for all forked children.
module.make_data(config.model_copy(update={"output": config.output.model_copy(update={"directory": reference})}), print)
countdown = -1


def count_step(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


for owner, name in (
    (os, "replace"),
    (os, "rename"),
    (os, "fsync"),
    (os, "unlink"),
    (ShardWriter, "add_documents"),
    (Path, "unlink"),
    (Path, "write_text"),
):
    setattr(owner, name, count_step(getattr(owner, name) if name != "fsync" else lambda descriptor: None))


def attempt(kill_at: int) -> int:
    global countdown
    child = os.fork()
    if child == 0:
        countdown = kill_at
        module.make_data(config, lambda text: None)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


expected, num_kills = contents(reference), 0
for kill_at in range(1, 1000):
    shutil.rmtree(directory, ignore_errors=True)
    status = attempt(kill_at)
    if status == 0:
        break
    assert status == signal.SIGKILL, f"{kill_at}: {status}"
    num_kills += 1
    attempt(1 + kill_at % 11)  # continues, and is killed again
    assert attempt(-1) == 0, f"killed at step {kill_at}"
    assert contents(directory) == expected, f"killed at step {kill_at}"
print("killed", num_kills)
