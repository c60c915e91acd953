"""Synthetic conversations whose answers can be checked: copy, reverse, sort, add, count."""

from __future__ import annotations

import hashlib

import numpy as np

from config.data import ChatTasks
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.sources.synthetic import SampledSource
from diffusionlm.diffusion.rng import RngStream, keyed_rng

TASKS_PER_BLOCK = 256

MAX_ATTEMPTS = 10_000
"""Prompts that are sampled at most until one is in the split."""


def make_task(config: ChatTasks, task: str, rng: np.random.Generator) -> tuple[str, str]:
    """Sample a prompt of a task, and compute its answer."""
    if task == "add":
        first, second = (int(rng.integers(10**config.digits)) for _ in range(2))
        return f"add: {first}+{second}", str(first + second)
    length = int(rng.integers(1, config.max_length + 1))
    word = "".join(config.symbols[index] for index in rng.integers(len(config.symbols), size=length))
    match task:
        case "copy":
            return f"copy: {word}", word
        case "reverse":
            return f"reverse: {word}", word[::-1]
        case "sort":
            return f"sort: {word}", "".join(sorted(word))
        case _:
            symbol = config.symbols[int(rng.integers(len(config.symbols)))]
            return f"count {symbol}: {word}", str(word.count(symbol))


class ChatTaskSource(SampledSource[Conversation]):
    """Conversations. A hash of the prompt decides whether it is for validation, so no prompt is in both splits."""

    config: ChatTasks
    block_size = TASKS_PER_BLOCK

    @property
    def identity(self) -> str:
        digest = hashlib.sha256(self.config.model_dump_json(by_alias=True).encode()).hexdigest()[:16]
        return f"chat_tasks/{self.split}/{digest}"

    @property
    def provenance(self) -> str:
        return f"{self.num_documents:,} conversations, made up: {', '.join(self.config.tasks)}"

    def sample_block(self, epoch: int, block: int) -> list[Conversation]:
        """Sample the conversations of a block.

        Raises:
            ValueError: there are too few prompts for a validation split.
        """
        rng = keyed_rng(self.config.seed, RngStream.CHAT_TASKS, int(self.split == "validation"), epoch, block)
        return [self._sample(rng) for _ in range(self.block_size)]

    def _sample(self, rng: np.random.Generator) -> Conversation:
        config = self.config
        for _ in range(MAX_ATTEMPTS):
            task = config.tasks[int(rng.integers(len(config.tasks)))]
            prompt, answer = make_task(config, task, rng)
            if is_held_out(prompt, config.validation_fraction) == (self.split == "validation"):
                messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
                return Conversation(messages, task=task)
        raise ValueError(
            f"{self.key}: the tasks have too few prompts to hold out some for validation: raise max_length or digits, "
            "or name more symbols"
        )


def is_held_out(prompt: str, fraction: float) -> bool:
    """Whether a hash of the prompt selects it for validation."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") / 2**64 < fraction
