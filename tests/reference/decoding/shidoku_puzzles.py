"""The accuracy of a model of 4x4 Sudoku grids on empty grids and on puzzles, by decoding order.

python -m tests.reference.decoding.shidoku_puzzles --model runs/shidoku
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarking.harness import at_least, make_table
from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.sources.synthetic import shidoku_grids
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.generate import infill
from diffusionlm.models.transformer import Transformer
from files.terminal_text import print_message
from logger.pages import Table
from logger.pages.terminal import print_parts
from tokenizer import Tokenizer

ORDERS = ("low_confidence", "random")
CELLS, BATCH_SIZE = 16, 256
EMPTY_CELL = "."


def is_shidoku(text: str) -> bool:
    return text in shidoku_grids()


def make_puzzle(grid: str, num_givens: int, rng: np.random.Generator) -> str:
    """Replace all but ``num_givens`` random cells of a grid by ``.``; the puzzle may have several solutions.

    Raises:
        ValueError: the text is not a grid, or ``num_givens`` is not 0 to 16.
    """
    if not is_shidoku(grid):
        raise ValueError(f"{grid!r} is not a 4x4 Sudoku grid: 16 digits 1 to 4, once in each row, column and 2x2 box")
    if not 0 <= num_givens <= 16:
        raise ValueError(f"num_givens = {num_givens}: expected 0 to 16")
    givens = set(rng.permutation(16)[:num_givens].tolist())
    return "".join(digit if cell in givens else EMPTY_CELL for cell, digit in enumerate(grid))


def find_solutions(puzzle: str) -> list[str]:
    """Return the grids that agree with a puzzle of 16 cells, each 1 to 4 or ``.``, sorted.

    Raises:
        ValueError: the text is not a puzzle.
    """
    if re.fullmatch(r"[1-4.]{16}", puzzle) is None:
        raise ValueError(f"{puzzle!r} is not a 4x4 puzzle: 16 cells row by row, each 1 to 4, or {EMPTY_CELL}")
    matches = re.compile(puzzle).fullmatch
    return [grid for grid in shidoku_grids() if matches(grid)]


@dataclass(frozen=True)
class PuzzleSet:
    """Puzzles that are decoded with the same settings."""

    name: str
    puzzles: Sequence[str]
    temperature: float


def build_puzzle_sets(count: int, givens: int) -> list[PuzzleSet]:
    """Build empty grids, puzzles with one solution and puzzles with several."""
    rng = keyed_rng(0, RngStream.SYNTHETIC, givens)
    grids = shidoku_grids()
    puzzles = [make_puzzle(grids[rng.integers(len(grids))], givens, rng) for _ in range(count)]
    unique = [text for text in puzzles if len(find_solutions(text)) == 1]
    ambiguous = [text for text in puzzles if len(find_solutions(text)) > 1]
    return [
        PuzzleSet("empty grids, temperature 1", [EMPTY_CELL * CELLS] * count, 1.0),
        PuzzleSet(f"{givens} givens, one solution, greedy", unique, 0.0),
        PuzzleSet(f"{givens} givens, several solutions, greedy", ambiguous, 0.0),
    ]


def complete_puzzles(model: Transformer, tokenizer: Tokenizer, puzzle_set: PuzzleSet, order: str) -> list[str]:
    """Fill in the empty cells, one per forward, and return the grids."""
    config = GenerationConfig(remasking_strategy=order, temperature=puzzle_set.temperature)
    prefix_ids = model.config.prefix_ids
    canvases = []
    for text in puzzle_set.puzzles:
        cells = [
            [model.config.required_mask_token_id] if cell == EMPTY_CELL else tokenizer.encode(cell) for cell in text
        ]
        canvases.append([*prefix_ids, *(token for cell in cells for token in cell)])
    grids: list[str] = []
    for start in range(0, len(canvases), BATCH_SIZE):
        batch = canvases[start : start + BATCH_SIZE]
        results = infill(model, batch, config, list(range(start, start + len(batch))))
        grids += [tokenizer.decode(result.token_ids[len(prefix_ids) :]) for result in results]
    return grids


def keeps_givens(text: str, grid: str) -> bool:
    return all(given in (EMPTY_CELL, cell) for given, cell in zip(text, grid, strict=True))


def evaluate(model: Transformer, tokenizer: Tokenizer, *, count: int, givens: int) -> Table:
    """Measure the share of valid grids of each puzzle set and decoding order."""
    rows = []
    for puzzle_set in build_puzzle_sets(count, givens):
        for order in ORDERS:
            print_message(f"{puzzle_set.name}, {order}")
            grids = complete_puzzles(model, tokenizer, puzzle_set, order)
            pairs = zip(puzzle_set.puzzles, grids, strict=True)
            valid = sum(is_shidoku(grid) and keeps_givens(text, grid) for text, grid in pairs)
            share = valid / max(1, len(grids))
            error = math.sqrt(share * (1.0 - share) / max(1, len(grids)))
            distinct = len(set(filter(is_shidoku, grids)))
            rows.append([puzzle_set.name, order, str(len(grids)), f"{share:.1%} +- {error:.1%}", str(distinct)])
    return make_table(["puzzles", "order", "grids", "valid", "distinct"], rows)


def main() -> None:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description="Count the valid grids of a Shidoku model.")
    parser.add_argument("--model", required=True, help="run or model directory")
    parser.add_argument("--count", type=at_least(1), default=1_000, help="grids of each kind (default: 1000)")
    parser.add_argument("--givens", type=int, choices=range(CELLS + 1), default=6, help="digits (default: 6)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    print_parts([evaluate(model, tokenizer, count=options.count, givens=options.givens)])


if __name__ == "__main__":
    main()
