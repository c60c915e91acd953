"""Write the puzzles of config/resources/rl_shidoku.toml: 4x4 Sudoku with seven givens, whose blanks are masked spans.

python -m tests.reference.decoding.rl_puzzles

All solutions of a puzzle to train on are grids that the source `shidoku` trains on with this validation_fraction, and
all solutions of a held-out puzzle are held-out grids. With ``--givens 3 --folder FOLDER`` puzzles have fewer givens and
several solutions, of either kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

import numpy as np

from config.data import ShidokuGrids
from diffusionlm.data.reader import Split
from diffusionlm.data.sources.synthetic import ShidokuSource
from tests.reference.decoding.shidoku_puzzles import find_solutions, make_puzzle

FOLDER = Path(__file__).parents[3] / "config" / "resources" / "rl_shidoku"
VALIDATION_FRACTION, NUM_GIVENS = 0.3, 7
COUNTS: dict[Split, int] = {"train": 4_000, "validation": 256}
NAMES: dict[Split, str] = {"train": "train.jsonl.gz", "validation": "held_out.jsonl"}


def make_puzzles(split: Split, num_givens: int = NUM_GIVENS) -> list[str]:
    """Different puzzles with one solution, a grid of the split; with other givens, with several of all grids."""
    config = ShidokuGrids(validation_fraction=VALIDATION_FRACTION)
    grids = ShidokuSource(config, split, "data.source").grids
    rng, puzzles = np.random.default_rng(0), dict[str, None]()
    while len(puzzles) < COUNTS[split]:
        puzzle = make_puzzle(grids[int(rng.integers(len(grids)))], num_givens, rng)
        solutions = find_solutions(puzzle)
        if len(solutions) > 1 if num_givens != NUM_GIVENS else len(solutions) == 1 and solutions[0] in grids:
            puzzles[puzzle] = None
    return list(puzzles)


def write_puzzles(folder: Path = FOLDER, num_givens: int = NUM_GIVENS) -> None:
    """Write a line {"puzzle", "question"} for each puzzle."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in NAMES.items():
        lines = []
        for puzzle in make_puzzles(split, num_givens):
            question = re.sub(r"\.+", lambda blanks: f"[MASK:{len(blanks[0])}]", puzzle)
            lines.append(json.dumps({"puzzle": puzzle, "question": question}) + "\n")
        data = "".join(lines).encode()
        (folder / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--givens", type=int, default=NUM_GIVENS)
    options = parser.parse_args()
    write_puzzles(options.folder, options.givens)
