"""Fill texts with masked spans, or answer prompts, during training: a person sees what the model has learned."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from config.data import PythonStdlib, Shards
from config.generation import GenerationConfig
from config.model import ModelConfig
from config.train import TrainConfig
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, ObjectiveConfig
from diffusionlm.data.chat.conversation import Conversation, join_texts
from diffusionlm.data.packing import Row
from diffusionlm.data.sources import read_reference_answers
from diffusionlm.inference.generate import Trajectory, decode
from diffusionlm.inference.healing import HealedText, encode_pieces, split_infill
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.inference.text import token_texts
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.image_files import to_thumbnail
from diffusionlm.vision.images import PlacedImage
from diffusionlm.vision.processor import ImageProcessor
from logger import RunLogger
from tokenizer import Tokenizer

PYTHON_INFILLS = (
    "for i in [MASK:1](10):\n    print(i)\n",
    "def __init__([MASK:1], name):\n    self.name = [MASK:1]\n",
    "if x is [MASK:1] None:\n    return [MASK:2]\n",
)

NUM_PASSAGES = 3
NUM_PROMPTS = 3
NUM_CANDIDATES = 16
"""Held-out conversations among which prompts that fit the model are searched."""
MAX_ANSWER_TOKENS = 64
MAX_PASSAGE_TOKENS = 32
MIN_PASSAGE_CHARACTERS = 4

_WORD_AND_SPACE = re.compile(r"(?<=\S) \w+")
"""The space belongs to the first token of the word."""


def find_infills(rows: Sequence[Row], tokenizer: Tokenizer, context: int) -> Iterator[str]:
    """Yield a passage of each row that has one, at most half of the ``context`` in tokens, with ``[MASK:n]`` in place
    of the n tokens of a word."""
    for row in rows:
        document_ids = row.document_ids_L[row.loss_mask_L]
        longest_document = np.bincount(document_ids).argmax() if len(document_ids) else 0
        token_ids = row.tokens_L[row.loss_mask_L & (row.document_ids_L == longest_document)]
        token_ids = token_ids[token_ids != tokenizer.eos_token_id][: min(MAX_PASSAGE_TOKENS, context // 2)]
        text = _trim_to_words(tokenizer.decode(token_ids.tolist()))
        if len(text) < MIN_PASSAGE_CHARACTERS or "[MASK:" in text:
            continue
        words = [match.span() for match in _WORD_AND_SPACE.finditer(text)]
        middle = len(text) // 2  # of a text without spaces, mask two characters
        start, end = words[len(words) // 2] if words else (middle, middle + 2)
        yield f"{text[:start]}[MASK:{len(tokenizer.encode(text[start:end]))}]{text[end:]}"


def _trim_to_words(text: str) -> str:
    """Cut off a partial line or word at the start, and a partial word at the end."""
    text = text.strip("\ufffd")  # bytes of a character whose other bytes are in another row
    middle = len(text) // 2
    start = text.find("\n", 0, middle)
    if start < 0:
        start = text.find(" ", 0, middle)
    end = max(text.rfind("\n", middle), text.rfind(" ", middle))
    return text[start + 1 : end if end >= 0 else len(text)].strip()


def choose_infills(
    config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer, validation_rows: Sequence[Row]
) -> tuple[str, ...]:
    """Return ``samples.infills``, or its default, of which only texts that fit the model's context."""
    if config.samples.infills is not None:
        return config.samples.infills
    if model.is_autoregressive or config.data.has_only_chats:
        return ()
    if all(isinstance(component.source, PythonStdlib) for component in config.data.components):
        candidates = list(PYTHON_INFILLS)
    else:
        candidates = list(islice(find_infills(validation_rows, tokenizer, model.max_position_embeddings), NUM_PASSAGES))
    max_length = model.max_position_embeddings - len(model.prefix_ids)
    encoded = {text: encode_pieces(tokenizer, split_infill(text), mask_token_id=0) for text in candidates}
    return tuple(text for text in candidates if len(encoded[text].token_ids) <= max_length)


def choose_example_input(
    config: TrainConfig,
    infills: Sequence[str],
    model: ModelConfig,
    tokenizer: Tokenizer,
    validation_rows: Sequence[Row],
) -> str:
    """Return an input to try the model with: the first question of a held-out conversation, else the first infill, else
    the beginning of a passage of the validation text, which is empty if there is no passage."""
    if config.data.has_only_chats:
        (reference,) = _read_held_out(config, 1)
        return next((join_texts(message) for message in reference.messages if message["role"] == "user"), "")
    if infills:
        return infills[0]
    infill = next(find_infills(validation_rows, tokenizer, model.max_position_embeddings), "")
    return infill.partition("[MASK:")[0]


def _read_held_out(config: TrainConfig, count: int) -> Sequence[Conversation]:
    source = config.data.components[0].source
    assert not isinstance(source, Shards), "shards have no conversations"
    return read_reference_answers(source, "validation", "data.source", count)


def _build_generation_config(objective: ObjectiveConfig, model: Transformer) -> GenerationConfig:
    """The attention of training, and no cache where the attention or its backend has none."""
    bias = objective.attention_bias if isinstance(objective, MaskedDiffusionConfig) else None
    has_independent_blocks = isinstance(objective, BlockDiffusionConfig) and objective.attention != "block_diffusion"
    return GenerationConfig(
        attention="prompt_and_own_block" if has_independent_blocks else None,
        attention_bias=bias,
        # The default cache of a block-causal model is "block", and these backends have no cached form.
        cache="none" if has_independent_blocks or model.attention_backend in ("tiled", "flex") else None,
    )


def _without_repeats(values_L: NDArray[np.int64], images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Values of the positions of a text, of each image that of its first placeholder alone."""
    repeats = [np.arange(placed.start + 1, placed.end) for placed in images]
    return np.delete(values_L, np.concatenate(repeats)) if repeats else values_L


@dataclass(frozen=True)
class Samples:
    """Texts with masked spans, or prompts of conversations, encoded."""

    tokenizer: Tokenizer
    texts: Sequence[str]
    num_hidden: int
    """Tokens before each text, which are not shown."""
    requests: list[PreparedRequest]
    """Empty on ranks that decode nothing."""
    pictures: Sequence[Sequence[str]] = field(default=(), kw_only=True)
    """Images of each text, small, as data URLs. Empty: there are none."""

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        infills: Sequence[str],
        tokenizer: Tokenizer,
        model: Transformer,
        is_participating: bool = True,
        processor: ImageProcessor | None = None,
    ) -> Samples:
        """Encode the infills of a run; of a run on conversations without ``samples.infills``, held-out prompts.

        Args:
            is_participating: whether this rank decodes them: the first one does; under FSDP, whose forwards are
                collective, all do.
            processor: of the images in conversations. None: prompts with images are left out.

        Raises:
            ValueError: ``samples.infills`` cannot be filled by this model.
        """
        generation = _build_generation_config(config.objective, model)
        if not config.samples.every_steps:
            return cls(tokenizer, (), 0, [])
        if config.samples.infills is None and config.data.has_only_chats:
            builder = RequestBuilder.from_config(
                tokenizer, model.config, generation, tokenizer.chat_template, processor=processor
            )
            samples = cls._open_answers(config, builder)
            return samples if is_participating else replace(samples, requests=[])
        try:
            builder = RequestBuilder.from_config(tokenizer, model.config, generation, token_healing=True)
            requests = [
                builder.prepare(builder.encode_spans(split_infill(text)), seed, repr(text))
                for seed, text in enumerate(infills)
            ]
        except ValueError as error:
            raise ValueError(f"samples.infills = {list(infills)}: {error}") from error
        return cls(tokenizer, infills, len(builder.prefix_ids), requests if is_participating else [])

    @classmethod
    def _open_answers(cls, config: TrainConfig, builder: RequestBuilder) -> Samples:
        """Encode held-out prompts with the generation prompt, those that fit the model with an answer and that the
        template does not refuse."""
        context = builder.settings.model.max_position_embeddings
        eos_padding_length = config.data.chats[0].resolve(config.objective.longest_block_length).eos_padding_length
        num_tokens = min(eos_padding_length or MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS, max(1, context // 2))
        assert builder.template is not None, "prepare_tokenizer has set it"
        prompts: list[HealedText] = []
        for item in _read_held_out(config, NUM_CANDIDATES):
            with suppress(ValueError):
                prompts.append(builder.encode_chat(item.messages[:-1], item.tools))
        prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= context - num_tokens][:NUM_PROMPTS]
        requests = [
            builder.prepare(prompt, seed, "samples", max_new_tokens=num_tokens) for seed, prompt in enumerate(prompts)
        ]
        decode_text = builder.tokenizer.decode
        texts = [
            decode_text(_without_repeats(np.array(prompt.token_ids), prompt.options.images).tolist())
            for prompt in prompts
        ]
        pictures = [[to_thumbnail(placed.image.content) for placed in prompt.options.images] for prompt in prompts]
        return cls(builder.tokenizer, texts, 0, requests, pictures=pictures if any(pictures) else ())

    def log_samples(self, model: Transformer, step: int, logger: RunLogger) -> None:
        """Fill the masked spans, or answer the prompts, with the model's defaults, and log an event for each text."""
        if not self.requests:
            return
        results = decode(model, self.requests)
        for index, (text, request, result) in enumerate(zip(self.texts, self.requests, results, strict=True)):
            assert result.trajectory is not None
            is_stopped = result.finish_reason == "stop"
            values = self.describe(text, result.trajectory, request.options.images, is_stopped=is_stopped)
            if self.pictures:
                values["pictures"] = self.pictures[index]
            logger.event(step, "sample", f"step {step}: {text!r} -> {values['filled']!r}", values)

    def describe(
        self, text: str, trajectory: Trajectory, images: Sequence[PlacedImage] = (), *, is_stopped: bool
    ) -> dict[str, Any]:
        """``given``, ``filled`` and its ``tokens`` as text, without a stop token and with one placeholder of each
        image. For each token ``step_map``, the forward (from 1) that committed it, and ``logprobs``, in nats; null for
        tokens that were not masked."""
        shown = _without_repeats(np.arange(trajectory.text_length - is_stopped), images)[self.num_hidden :]
        tokens = token_texts(self.tokenizer, trajectory.tokens_L[shown].tolist())
        return {
            "given": text,
            "filled": "".join(tokens),
            "tokens": tokens,
            "step_map": [step or None for step in trajectory.step_map_L[shown].tolist()],
            "logprobs": [value if math.isfinite(value) else None for value in trajectory.logprobs_L[shown].tolist()],
        }
