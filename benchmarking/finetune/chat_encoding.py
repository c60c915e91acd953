"""Conversations that are encoded per second with ChatML: the built-in template, and the same one in a file.

python -m benchmarking.finetune.chat_encoding --data train.jsonl

Both take turns in one process. The seconds are user CPU time, with that of the process that renders templates of files.
Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarking.finetune.chat_rows import train_chat_tokenizer
from config.data import LocalFiles
from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.encoder import ChatEncoder, ChatRecords
from diffusionlm.data.sources import open_source
from tokenizer import CHAT_TEMPLATES, Tokenizer

ROW_LENGTH = 1_024
IN_FILE, BUILT_IN = "in a file", "built in"


def read_conversations(data: Path, limit: int) -> list[str]:
    """Read the first questions and answers of a file."""
    chat = ChatRowsConfig(columns={"prompt": "question", "completion": "answer"})
    section = LocalFiles(paths=(str(data),), validation_paths=(str(data),), chat=chat)
    return open_source(section, "train", "data.source").read(0, None, limit)[0]


def measure_speeds(texts: Sequence[str], tokenizer: Tokenizer, rounds: int) -> dict[str, list[float]]:
    """Conversations per second of each round, by where the template is."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chatml.jinja"
        path.write_text(CHAT_TEMPLATES["chatml"].source + "{# of a file #}", encoding="utf-8")
        encoders = {
            name: ChatEncoder(
                ChatRecords(ChatRowsConfig(template=template, turns="last"), "chat", "raise"), tokenizer, ROW_LENGTH
            )
            for name, template in ((IN_FILE, str(path)), (BUILT_IN, "chatml"))
        }
        speeds: dict[str, list[float]] = {name: [] for name in encoders}
        for _ in range(rounds):
            for name, encoder in encoders.items():
                before = read_user_seconds()
                for text in texts:
                    encoder.encode(text)
                speeds[name].append(len(texts) / max(1e-9, read_user_seconds() - before))
    return speeds


def read_user_seconds() -> float:
    """User CPU time of this process and its children."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stats = (Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children)
    return os.times().user + sum(int(fields[11]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the median and the range of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--conversations", type=int, default=500, help="default: 500")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--vocab", type=int, default=2048, help="tokens of the vocabulary; default: 2048")
    options = parser.parse_args(argv)
    texts = read_conversations(options.data, options.conversations)
    speeds = measure_speeds(texts, train_chat_tokenizer(options.data, options.vocab), options.rounds)
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"{name}: {median:,.0f} conversations/s [{min(values):,.0f}, {max(values):,.0f}]")


if __name__ == "__main__":
    main()
