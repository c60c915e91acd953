"""What a model of 4x4 Sudoku grids can do: grids from nothing, and puzzles, by order of decoding.

python -m benchmarking.eval_shidoku --model runs/shidoku
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarking.harness import collect_environment, markdown_list, markdown_table, print_message
from config.generation import GenerationConfig, RemaskingStrategy
from diffusionlm.checkpoints.huggingface import load_model, load_tokenizer
from diffusionlm.data.synthetic import EMPTY_CELL, find_solutions, is_shidoku, puzzle, shidoku_grids
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.generate import infill
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

ORDERS: tuple[RemaskingStrategy, ...] = ("low_confidence", "random")
CELLS, BATCH = 16, 256


@dataclass(frozen=True)
class PuzzleSet:
    """Puzzles that are decoded alike."""

    name: str
    puzzles: Sequence[str]
    temperature: float


def build_puzzle_sets(count: int, givens: int) -> list[PuzzleSet]:
    """Empty grids, and puzzles with one and with several solutions."""
    rng = keyed_rng(0, RngStream.SYNTHETIC, givens)
    grids = shidoku_grids()
    drawn = [puzzle(grids[rng.integers(len(grids))], givens, rng) for _ in range(count)]
    unique = [text for text in drawn if len(find_solutions(text)) == 1]
    several = [text for text in drawn if len(find_solutions(text)) > 1]
    return [
        PuzzleSet("from nothing, temperature 1", [EMPTY_CELL * CELLS] * count, 1.0),
        PuzzleSet(f"{givens} givens, one solution, greedy", unique, 0.0),
        PuzzleSet(f"{givens} givens, several solutions, greedy", several, 0.0),
    ]


def complete_puzzles(model: Transformer, tokenizer: Tokenizer, task: PuzzleSet, order: RemaskingStrategy) -> list[str]:
    """The grids, one cell a forward."""
    config = GenerationConfig(remasking_strategy=order, temperature=task.temperature)
    begin = model.config.prefix_ids
    canvases = []
    for text in task.puzzles:
        cells = [[model.config.mask_token] if cell == EMPTY_CELL else tokenizer.encode(cell) for cell in text]
        canvases.append([*begin, *(token for cell in cells for token in cell)])
    done: list[str] = []
    for first in range(0, len(canvases), BATCH):
        some = canvases[first : first + BATCH]
        filled = infill(model, some, config, list(range(first, first + len(some))))
        done += [tokenizer.decode(result.token_ids[len(begin) :]) for result in filled]
    return done


def keeps_givens(text: str, grid: str) -> bool:
    """The grid has the puzzle's digits where they were."""
    return all(given in (EMPTY_CELL, cell) for given, cell in zip(text, grid, strict=True))


def report(model: Transformer, tokenizer: Tokenizer, *, count: int, givens: int) -> str:
    """Markdown table of the shares of valid grids."""
    rows = []
    for task in build_puzzle_sets(count, givens):
        for order in ORDERS:
            print_message(f"{task.name}, {order}")
            grids = complete_puzzles(model, tokenizer, task, order)
            pairs = zip(task.puzzles, grids, strict=True)
            right = sum(is_shidoku(grid) and keeps_givens(text, grid) for text, grid in pairs)
            share = right / max(1, len(grids))
            error = math.sqrt(share * (1.0 - share) / max(1, len(grids)))
            distinct = f"{len(set(filter(is_shidoku, grids)))}"
            rows.append([task.name, order, str(len(grids)), f"{share:.1%} +- {error:.1%}", distinct])
    return markdown_table(["task", "order", "grids", "valid", "distinct"], rows)


def main() -> None:
    """Parse, decode, print."""
    parser = argparse.ArgumentParser(description="Count the valid grids of a Shidoku model.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="run or model directory")
    parser.add_argument("--count", type=int, default=1_000, help="grids of each kind (default: 1000)")
    parser.add_argument("--givens", type=int, default=6, help="digits of a puzzle (default: 6)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    if arguments.count < 1 or not 0 <= arguments.givens <= CELLS or arguments.threads < 1:
        parser.error("--count and --threads must be at least 1, --givens from 0 to 16")
    torch.set_num_threads(arguments.threads)
    try:
        model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    except ValueError as error:
        parser.error(str(error))
    print(report(model, tokenizer, count=arguments.count, givens=arguments.givens))
    print(f"\n{markdown_list(collect_environment(threads=arguments.threads, packages=['torch']))}")


if __name__ == "__main__":
    main()
