"""The puzzles of rl_shidoku.toml: each has one solution, and held-out ones are of grids that no command trains on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from config.load import load_config
from config.train import TrainConfig
from diffusionlm.data.sources.synthetic import ShidokuSource
from tests.reference.decoding.rl_puzzles import COUNTS, FOLDER, NAMES, NUM_GIVENS
from tests.reference.decoding.shidoku_puzzles import find_solutions

RESOURCES = Path(__file__).parents[3] / "config" / "resources"


def test_held_out_puzzles_share_no_solution_with_training() -> None:
    source = load_config(TrainConfig, RESOURCES / "rl_shidoku_start.toml").data.components[0].source
    for split, name in NAMES.items():
        data = (FOLDER / name).read_bytes()
        lines = (gzip.decompress(data) if name.endswith(".gz") else data).decode().splitlines()
        records = [json.loads(line) for line in lines]
        grids = set(ShidokuSource(source, split, "data.source").grids)
        assert len({record["puzzle"] for record in records}) == COUNTS[split]
        for record in records[::16]:
            [solution] = find_solutions(record["puzzle"])
            assert solution in grids and record["puzzle"].count(".") == 16 - NUM_GIVENS
            blanks = sum(int(part.partition("]")[0]) for part in record["question"].split("[MASK:")[1:])
            assert blanks == 16 - NUM_GIVENS
