"""Synthetic text of exact entropy, and conversations with right answers: the same from every position and seed."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from config.data import ChatTasks, LocalFiles, MarkovChain, PythonStdlib, ShidokuGrids, SyntheticText
from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.reader import Split
from diffusionlm.data.sources import open_source, read_reference_answers
from diffusionlm.data.sources.synthetic import (
    DOCUMENTS_PER_BLOCK,
    ChatTaskSource,
    MarkovSource,
    ShidokuSource,
    SyntheticSource,
    shidoku_grids,
)
from tests.reference.decoding.shidoku_puzzles import is_shidoku

Drain = Callable[..., list[Any]]
ALL = [
    MarkovChain(),
    MarkovChain(symbols="01", length=5, stay=0.0),
    MarkovChain(symbols="xyz", length=7, stay=1.0),
    ShidokuGrids(),
]


@pytest.fixture(params=ALL, ids=lambda config: f"{config.kind}{ALL.index(config)}")
def config(request: pytest.FixtureRequest) -> SyntheticText:
    return request.param


def of_size(config: SyntheticText, size: int, **changes: Any) -> SyntheticText:
    return type(config).model_validate(config.model_dump() | {"documents_per_epoch": size} | changes)


def open_train(config: SyntheticText) -> SyntheticSource:
    source = open_source(config, "train", "data.source")
    assert isinstance(source, SyntheticSource)
    return source


def log_probability(source: SyntheticSource, text: str) -> float:
    """Return ln p(text) in nats; AssertionError if the probability is 0."""
    match source:
        case MarkovSource(config=config):
            symbols, length, stay = config.symbols, config.length, config.stay
            assert len(text) == length and set(text) <= set(symbols)
            num_stays = sum(a == b for a, b in itertools.pairwise(text))
            num_moves = length - 1 - num_stays
            p_move = (1.0 - stay) / (len(symbols) - 1)
            return -math.log(len(symbols)) + _power_log(stay, num_stays) + _power_log(p_move, num_moves)
        case ShidokuSource():
            assert is_shidoku(text)
            return -math.log(288)
    raise AssertionError(f"unknown source {source}")


def _power_log(probability: float, exponent: int) -> float:
    return exponent * math.log(probability) if exponent else 0.0


def test_samples_have_the_stated_entropy_and_lengths(config: SyntheticText) -> None:
    source = open_train(config)
    documents, _ = source.read(0, None, 10_000)
    information = -np.array([log_probability(source, text) for text in documents])
    standard_error = information.std(ddof=1) / math.sqrt(len(information))
    assert abs(information.mean() - source.entropy_nats) <= 4 * standard_error + 1e-9
    assert set(map(len, documents)) == {source.length}
    assert all(text.isascii() and text.isprintable() for text in documents)


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            MarkovChain(symbols="abc", length=5, stay=0.7),
            ["".join(text) for text in itertools.product("abc", repeat=5)],
        ),
        (MarkovChain(symbols="ab", length=1), ["a", "b"]),
        (ShidokuGrids(), list(shidoku_grids())),
    ],
)
def test_probabilities_sum_to_one(config: SyntheticText, texts: list[str]) -> None:
    distribution = open_train(config)
    logs = np.array([log_probability(distribution, text) for text in texts])
    assert len(set(texts)) == len(texts)
    assert np.exp(logs).sum() == pytest.approx(1.0, abs=1e-12)
    assert -(np.exp(logs) * logs).sum() == pytest.approx(distribution.entropy_nats, abs=1e-10)


def test_grids_are_held_out_and_training_documents_noisy() -> None:
    config = ShidokuGrids(validation_fraction=0.3, noise=0.2)
    train, held_out = (ShidokuSource(config, split, "data.source") for split in ("train", "validation"))
    assert set(train.grids) | set(held_out.grids) == set(shidoku_grids())
    assert not set(train.grids) & set(held_out.grids) and 60 < len(held_out.grids) < 115
    assert train.entropy_nats is None and held_out.entropy_nats == math.log(len(held_out.grids))
    documents, _ = train.read(0, None, 4_000)
    nearest = [min(sum(a != b for a, b in zip(text, grid, strict=True)) for grid in train.grids) for text in documents]
    # A digit that is drawn anew is the same one in a quarter of the cases; a noisy grid may be nearer to another one.
    assert 0.10 < np.mean(nearest) / 16 < 0.15
    assert set(held_out.read(0, None, 500)[0]) <= set(held_out.grids)


@pytest.mark.parametrize("size", [1, DOCUMENTS_PER_BLOCK - 1, DOCUMENTS_PER_BLOCK, 2 * DOCUMENTS_PER_BLOCK + 300])
def test_reading_on_from_any_position(size: int, config: SyntheticText, drain: Drain) -> None:
    whole = drain(open_train(of_size(config, size)), (10 * size,))
    assert len(whole) == size
    assert drain(open_train(of_size(config, size)), (7, 1, 1000)) == whole
    for start in {0, 1, size // 3, size - 1, size, min(DOCUMENTS_PER_BLOCK, size)}:
        head, position = open_train(of_size(config, size)).read(0, None, start)
        assert head + drain(open_train(of_size(config, size)), (513,), position=position) == whole
    assert drain(open_train(of_size(config, size + 99)))[:size] == whole, "a longer epoch starts alike"


def test_epochs_splits_and_seeds_differ(drain: Drain) -> None:
    config = MarkovChain(documents_per_epoch=3 * DOCUMENTS_PER_BLOCK, validation_documents=1500)
    train, validation = open_train(config), open_source(config, "validation", "data.source")
    others = [open_train(config.model_copy(update=change)) for change in ({"seed": 1}, {"length": 31}, {"stay": 0.7})]
    whole, held_out = drain(train), drain(validation)
    assert (len(whole), len(held_out)) == (3 * DOCUMENTS_PER_BLOCK, 1500)
    blocks = [whole[:DOCUMENTS_PER_BLOCK], whole[DOCUMENTS_PER_BLOCK:]]
    for a, b in itertools.combinations([*blocks, drain(train, epoch=1), held_out, drain(others[0])], 2):
        # Only chains that hardly ever move are likely enough to occur twice.
        assert len(set(a) & set(b)) < 40
    assert len({source.identity for source in (train, validation, *others)}) == 5


def conversations(config: ChatTasks, split: Split = "train", epoch: int = 0) -> list[Conversation]:
    return ChatTaskSource(config, split, "data.source").read(epoch, None, 10_000)[0]


def solve(prompt: str) -> str:
    """An independent solution."""
    task, _, operand = prompt.partition(": ")
    if task == "add":
        return str(eval(operand))
    if task.startswith("count "):
        return str(sum(symbol == task[-1] for symbol in operand))
    return {"copy": operand, "reverse": "".join(reversed(operand)), "sort": "".join(sorted(operand))}[task]


def test_answers_are_right_and_splits_disjoint() -> None:
    config = ChatTasks(documents_per_epoch=3_000, validation_documents=300)
    train, held_out = conversations(config), conversations(config, "validation")
    assert (len(train), len(held_out)) == (3_000, 300)
    for conversation in train + held_out:
        prompt, answer = (message["content"] for message in conversation.messages)
        assert answer == solve(prompt)
    prompts = [{item.messages[0]["content"] for item in items} for items in (train, held_out)]
    assert prompts[0].isdisjoint(prompts[1])
    shares = [int(hashlib.sha256(prompt.encode()).hexdigest()[:16], 16) / 2**64 for prompt in prompts[1]]
    assert max(shares) < 0.1
    shares = [sum(item.task == task for item in train) / len(train) for task in config.tasks]
    assert all(share == pytest.approx(0.2, abs=0.04) for share in shares)


def test_identities_are_those_of_checkpoints_of_older_versions() -> None:
    config = ChatTasks(chat=ChatRowsConfig(template="chatml", eos_padding="length:8"))
    assert ChatTaskSource(config, "train", "data.source").identity == "chat_tasks/train/333e024ab180f088"
    assert hashlib.sha256(config.chat.identity.encode()).hexdigest()[:16] == "e7776cad59a7a47e"


def test_too_few_prompts_are_refused() -> None:
    config = ChatTasks(tasks=("copy",), symbols="ab", max_length=1, validation_fraction=0.001)
    with pytest.raises(ValueError, match=r"data.source: .*too few prompts"):
        conversations(config, "validation")


def test_reference_answers_are_the_last_answers() -> None:
    config = ChatTasks(validation_documents=50)
    answers = read_reference_answers(config, "validation", "source", 20)
    assert len(answers) == 20
    expected = conversations(config, "validation")
    assert answers == [item for index, item in enumerate(expected) if item not in expected[:index]][:20]
    prompts = {item.messages[0]["content"] for item in conversations(config, "validation")}
    answers = read_reference_answers(config, "validation", "source", 1_000)
    assert len(prompts) < 50 and len(answers) == len(prompts), "a prompt that comes again is left out"
    for text in (PythonStdlib(), LocalFiles(paths=("x",))):
        with pytest.raises(ValueError, match="source has text, not conversations"):
            read_reference_answers(text, "validation", "source", 3)
