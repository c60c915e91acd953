"""Synthetic conversations: right answers, no prompt in both splits, the same for the same seed."""

from __future__ import annotations

import hashlib

import pytest

from config.data import ChatTasks, LocalFiles, PythonStdlib
from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.reader import Split
from diffusionlm.data.sources import read_reference_answers
from diffusionlm.data.sources.synthetic import ChatTaskSource


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
