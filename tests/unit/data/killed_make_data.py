"""A program: makes data, and is killed at one step after the other; what goes on must give the same files.

Arguments: the config as JSON, a directory for the reference, the stride of the steps.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from config.make_data import MakeDataConfig
from diffusionlm.data import make_data as module
from diffusionlm.data.shard_writers import HashedFile

values, reference = json.loads(sys.argv[1]), Path(sys.argv[2])
module.CHUNK_CHARACTERS, module.CHUNK_READ_DOCUMENTS = 700, 3
config = MakeDataConfig.model_validate(values)
directory = config.output.directory
# Also loads what is loaded when it is needed, once for all children.
module.make_data(config.model_copy(update={"output": config.output.model_copy(update={"directory": reference})}), print)
countdown = -1


def step(do):
    def counted(*arguments, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*arguments, **options)

    return counted


for owner, name in ((os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (HashedFile, "write")):
    setattr(owner, name, step(getattr(owner, name) if name != "fsync" else lambda descriptor: None))
Path.unlink = step(Path.unlink)
Path.write_text = step(Path.write_text)


def attempt(kill_at):
    global countdown
    child = os.fork()
    if child == 0:
        countdown = kill_at
        module.make_data(config, lambda text: None)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


expected, kills = contents(reference), 0
for kill_at in range(1, 1000, int(sys.argv[3])):
    shutil.rmtree(directory, ignore_errors=True)
    ended = attempt(kill_at)
    if ended == 0:
        break
    assert ended == signal.SIGKILL, f"{kill_at}: {ended}"
    kills += 1
    attempt(1 + kill_at % 11)  # goes on, and is killed again
    assert attempt(-1) == 0, f"killed at step {kill_at}"
    assert contents(directory) == expected, f"killed at step {kill_at}"
print("killed", kills)
