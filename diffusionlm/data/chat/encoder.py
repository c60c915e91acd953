"""Turn conversations into documents of tokens, with targets, EOS padding and segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
from unicodedata import normalize

import numpy as np

from config.data import OnBadRow
from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation, Message
from diffusionlm.data.chat.templates import QUESTION, resolve_chat_template
from diffusionlm.data.packing import Document
from diffusionlm.data.reader import REPAIRED_PREFIX, ResumableReader, SkipLog, WindowedReader
from diffusionlm.data.sources.record_source import shorten_repr
from diffusionlm.data.tokenization import CHUNK_DOCUMENTS
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.vision.images import EncodedImage, PlacedImage, expand_placeholders
from diffusionlm.vision.messages import IMAGE_PLACEHOLDER, IMAGE_TOKENS, find_image_tokens, split_images
from diffusionlm.vision.processor import ImageProcessor
from tokenizer import EncodedAnswer, Tokenizer, encode_answers, join_answers, render_chat

PlacedImages = tuple[PlacedImage, ...]

Skip = tuple[str, str]
"""Reason why something was left out or changed, by which it is counted; what is wrong with it, and the remedy."""

THOUGHTS_END = "</think>"

TOO_LONG = "longer than a row"
PROMPT_TOO_LONG = "prompt as long as a row"
REFUSED = "refused by the chat template"
UNDESIRABLE = "undesirable"
NOT_LEARNED = "no answer in {% generation %}"
CUT = f"{REPAIRED_PREFIX}cut to a row"
EXPANDED = f"{REPAIRED_PREFIX}turns expanded"
"""Because the chat template changes earlier answers."""
UNANSWERED = f"{REPAIRED_PREFIX}unanswered end left out"
THOUGHTS = "thoughts, which the chat template ends before answers"
BAD_IMAGE = "image cannot be read"
NO_THOUGHTS = f"{REPAIRED_PREFIX}thoughts left out"
"""Because the chat template writes none."""


@dataclass(frozen=True)
class ChatRecords:
    """What the records of a source mean as conversations."""

    config: ChatRowsConfig
    key: str
    """Config key of the section, for errors."""
    on_bad_row: OnBadRow
    template_hash: str | None = None
    """Of the files of the section's template, as the run opened them (`hash_template_files`)."""
    processor: ImageProcessor | None = None
    """Reads images. None: they are refused, because the model has no vision tower."""
    skip_log: SkipLog = field(default_factory=SkipLog)
    """Of the encoder. A conversation that becomes several documents counts as that many."""


class _UnusableError(ValueError):
    """A conversation cannot be learned, for a reason by which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ChatEncoder:
    """Encodes conversations for rows of a fixed length.

    Args:
        block_length: of block diffusion; None: bidirectional. It selects the defaults of `turns` and `eos_padding`.

    Raises:
        ValueError: the template does not allow to learn answers, or the EOS padding does not fit the objective.
    """

    def __init__(
        self, records: ChatRecords, tokenizer: Tokenizer, row_length: int, block_length: int | None = None
    ) -> None:
        self.config = records.config.resolve(block_length)
        self.records, self.row_length, self.block_length = records, row_length, block_length
        self._tokenizer = tokenizer
        if records.processor is not None:
            self._image_token_id = find_image_tokens(tokenizer.special_tokens)["image_token_id"]
            self._image_tokenizer = tokenizer.with_visible_tokens(IMAGE_TOKENS)
        self._template = resolve_chat_template(self.config, tokenizer, records.key)
        if self.config.eos_padding == "block" and block_length is None:
            raise ValueError(
                f'{records.key}.eos_padding = "block" needs blocks: set "length:N", or '
                'objective.kind = "block_diffusion"'
            )
        header = render_chat(self._template, [QUESTION], add_generation_prompt=True)
        self._has_closed_thoughts = header.rstrip().endswith(THOUGHTS_END)
        assert tokenizer.eos_token_id is not None, "build_row_reader has checked it"
        self._eos_token_id = tokenizer.eos_token_id

    def encode(
        self, conversation: Conversation, rng: np.random.Generator | None = None
    ) -> tuple[list[Document], list[Skip]]:
        """Encode a conversation; a preference is its chosen answer, undesirable answers are left out. Also returns
        what was left out or changed.

        Args:
            rng: selects the answer for `turns` = "one".

        Raises:
            ValueError: the template refuses the conversation, or an image cannot be read, while `on_bad_row` is
                "raise"; or there are images and no processor.
        """
        if self.records.processor is None and conversation.has_images:
            raise ValueError(
                f"{self.records.key}: {conversation.error_prefix}the conversation has images, and the model has no "
                "vision tower: set model.init_from to a model with one, such as Qwen3-VL, or set [model.vision]"
            )
        if conversation.is_desirable is False:
            return [], [(UNDESIRABLE, 'its label is false; objective.loss = "kto" learns from it')]
        is_plain = conversation.rejected is None and conversation.is_desirable is None
        selection = self.config.turns if is_plain else "last"
        reasons: list[Skip] = []
        positions = conversation.learned_answers
        if selection == "last":
            positions = positions[-1:]
        elif selection == "one" and rng is not None:
            positions = [positions[int(rng.integers(len(positions)))]]
        if conversation.messages[-1]["role"] != "assistant":
            reasons.append((UNANSWERED, "messages after the last answer"))
        try:
            answers = self._encode_answers(conversation, positions, reasons)
        except ValueError as error:
            if self.records.on_bad_row == "raise":
                is_refused = self.config.template is not None and not isinstance(error, _UnusableError)
                template = f'template "{self.config.template}": ' if is_refused else ""
                raise ValueError(
                    f'{self.records.key}: {conversation.error_prefix}{template}{error}; set on_bad_row = "skip" beside '
                    "chat to leave such conversations out and count them"
                ) from error
            return [], [(error.reason if isinstance(error, _UnusableError) else REFUSED, str(error))]
        if not answers:
            return [], [*reasons, (NOT_LEARNED, "the template marks the answers to learn, and none of these")]
        groups = [([answer], images) for answer, images in answers]
        if selection == "all" and len(answers) > 1:
            joined = join_answers([answer for answer, _ in answers])
            if joined is None:
                reasons.append((EXPANDED, "the template writes earlier answers otherwise than the last one"))
            else:
                groups = [(joined, answers[-1][1])]
        documents = [self._build_document(group, images, reasons) for group, images in groups]
        return [document for document in documents if document is not None], reasons

    def encode_preference(
        self, conversation: Conversation, *, is_unpaired: bool = False
    ) -> tuple[list[tuple[Document, ...]], list[Skip]]:
        """Encode the chosen and the rejected answer with their prompt: a pair, or none and why one is left out. Or, if
        ``is_unpaired``, the last answer with its label.

        Raises:
            ValueError: there is no rejected answer, or label, or the template refuses the conversation while
                `on_bad_row` is "raise".
        """
        label = conversation.is_desirable
        if is_unpaired and label is not None:
            documents, reasons = self.encode(replace(conversation, is_desirable=True))
            return [(replace(document, is_desirable=label),) for document in documents], reasons
        if is_unpaired or conversation.rejected is None:
            needed, name = ("label", "unpaired") if is_unpaired else ("rejected answer", "preference")
            raise ValueError(
                f"{self.records.key}: {conversation.error_prefix}the conversation has no {needed}, which the loss "
                f'needs: set format = "{name}" and name its columns; only "kto" learns from single answers with labels'
            )
        chosen, rejected = (
            self.encode(replace(conversation, messages=messages, context_answers=()))
            for messages in (conversation.messages, conversation.rejected)
        )
        return list(zip(chosen[0], rejected[0], strict=False)), [*chosen[1], *rejected[1]][:1]

    def count(self, conversation: Conversation, reasons: Sequence[Skip], num_items: int) -> None:
        """Count what was left out of a conversation or changed, and the documents or pairs that it became."""
        log = self.records.skip_log
        num_left_out = log.num_left_out
        for reason, detail in reasons:
            log.add(reason, f"{conversation.error_prefix}{detail}")
        log.total += max(0, num_items + log.num_left_out - num_left_out - 1)

    def _encode_answers(
        self, conversation: Conversation, positions: Sequence[int], reasons: list[Skip]
    ) -> list[tuple[EncodedAnswer, PlacedImages]]:
        """Encode the answers at these positions that the template has learned, with the images of their prompts."""
        thoughts = [find_thoughts(conversation.messages[position]) for position in positions]
        if self._has_closed_thoughts and any(thoughts):
            thought = next(filter(None, thoughts))
            raise _UnusableError(
                THOUGHTS,
                f"the answer has thoughts, {shorten_repr(thought)}, and the chat template ends them before answers: "
                "set template_variables.enable_thinking = true to learn them, or remove them from the data "
                "(reasoning_content, or <think> in content)",
            )
        messages, images = self._read_images(conversation, positions[-1])
        tokenizer = self._image_tokenizer if images else self._tokenizer
        encoded = encode_answers(tokenizer, self._template, messages, positions, tools=conversation.tools)
        answers: list[tuple[EncodedAnswer, PlacedImages]] = []
        for answer, text, position in zip(encoded, thoughts, positions, strict=True):
            if answer is None:
                continue
            placed: PlacedImages = ()
            if images:
                answer, placed = self._expand_images(answer, messages[:position], images)
            written = self._tokenizer.decode(answer.answer_ids) if text else ""
            if normalize("NFC", text) not in normalize("NFC", written):
                detail = f"{shorten_repr(text)}; name a chat.template that writes reasoning_content"
                reasons.append((NO_THOUGHTS, detail))
            answers.append((answer, placed))
        return answers

    def _read_images(
        self, conversation: Conversation, end: int
    ) -> tuple[Sequence[Mapping[str, Any]], list[EncodedImage]]:
        """Replace the images of the messages up to ``end`` by placeholders, and check them."""
        if not conversation.has_images:
            return conversation.messages, []
        assert self.records.processor is not None, "encode has checked it"
        messages, images = split_images(conversation.messages[: end + 1])
        try:
            encoded = [self.records.processor.read_image(image) for image in images]
        except ValueError as error:
            raise _UnusableError(BAD_IMAGE, str(error)) from error
        return messages, [replace(image, location=conversation.location) for image in encoded]

    def _expand_images(
        self, answer: EncodedAnswer, prompt: Sequence[Mapping[str, Any]], images: Sequence[EncodedImage]
    ) -> tuple[EncodedAnswer, PlacedImages]:
        """Repeat the placeholders in the prompt of an answer as often as its images take positions."""
        num_images = sum(message["content"].count(IMAGE_PLACEHOLDER) for message in prompt)
        prompt_ids, placed = expand_placeholders(answer.prompt_ids, images[:num_images], self._image_token_id)
        expand_placeholders(answer.answer_ids, (), self._image_token_id)  # there are none
        return EncodedAnswer(tuple(prompt_ids), answer.answer_ids), placed

    def _build_document(
        self, answers: Sequence[EncodedAnswer], images: PlacedImages, reasons: list[Skip]
    ) -> Document | None:
        """Concatenate prompts and answers and add the EOS padding; None if they do not fit.

        A conversation that is cut ends with an answer, so an image stays whole or is left out.
        """
        parts = [part for answer in answers for part in (answer.prompt_ids, answer.answer_ids)]
        sizes = [len(part) for part in parts]
        end, num_eos_padding = sum(sizes), 0
        loss_mask = np.repeat([False, True] * len(answers), sizes)
        if end > self.row_length:
            detail, remedy = f"{end:,} tokens in rows of {self.row_length:,}", "raise data.row_length"
            if images:
                num_image_tokens = sum(placed.image.num_tokens for placed in images)
                detail += f", {num_image_tokens:,} of them for {len(images)} image{'s' * (len(images) > 1)}"
                remedy += " or lower data.images.max_pixels"
            detail = f"{detail}; {remedy}"
            if self.config.truncate_mode == "drop":
                reasons.append((TOO_LONG, f'{detail}, or set {self.records.key}.truncate_mode = "cut"'))
                return None
            learned = np.flatnonzero(loss_mask[: self.row_length])
            reasons.append((CUT if len(learned) else PROMPT_TOO_LONG, detail))
            if not len(learned):
                return None
            end = int(learned[-1]) + 1  # ends with an answer: a context alone teaches nothing
        else:
            num_eos_padding = min(self._count_eos_padding(answers[-1]), self.row_length - end)
        tokens = np.fromiter(chain.from_iterable(parts), np.int32, sum(sizes))[:end]
        segment_ids = np.repeat(np.arange(len(parts), dtype=np.int32) // 2, sizes)[:end]
        padding = (0, num_eos_padding)
        return Document(
            np.pad(tokens, padding, constant_values=self._eos_token_id),
            np.pad(loss_mask[:end], padding, constant_values=True),
            np.arange(end + num_eos_padding) >= end,
            np.pad(segment_ids, padding, mode="edge"),
            images=tuple(placed for placed in images if placed.end <= end),
        )

    def _count_eos_padding(self, answer: EncodedAnswer) -> int:
        """Count the EOS padding after the last answer. Blocks are counted from the start of its segment."""
        if self.config.eos_padding == "block":
            assert self.block_length is not None
            return -(len(answer.prompt_ids) + len(answer.answer_ids)) % self.block_length
        length = self.config.eos_padding_length
        return 0 if length is None else max(0, length - len(answer.answer_ids))


def find_thoughts(message: Message) -> str:
    """Return the reasoning of an answer: `reasoning_content`, or what its content has before `</think>`."""
    before, end, _ = message["content"].partition(THOUGHTS_END)
    thoughts: str = message.get("reasoning_content") or (before.rpartition("<think>")[2] if end else "")
    return thoughts.strip()


def read_documents(
    upstream: ResumableReader[Conversation],
    encoder: ChatEncoder,
    seed: int,
    key: tuple[int, ...] = (),
    encode: Callable[[Conversation], tuple[Sequence[Any], list[Skip]]] | None = None,
) -> WindowedReader[Conversation, Any]:
    """Read the documents of conversations, and count once, in the first epoch, what is left out.

    Args:
        seed: selects the answer for `turns` = "one", with key, epoch and index.
        encode: `ChatEncoder.encode_preference`, whose items are read in place of documents.
    """
    is_random = encoder.config.turns == "one"

    def encode_window(epoch: int, window: int, conversations: list[Conversation]) -> list[Any]:
        encoded: list[Any] = []
        for index, conversation in enumerate(conversations):
            is_new = encoder.records.skip_log.is_new(epoch, (window, index))
            items: Sequence[Any]
            if encode is not None:
                items, reasons = encode(conversation)
            else:
                rng = keyed_rng(seed, RngStream.ANSWER, *key, epoch, window, index) if is_random else None
                items, reasons = encoder.encode(conversation, rng)
            if is_new:
                encoder.count(conversation, reasons, len(items))
            encoded += items
        return encoded

    return WindowedReader(upstream, CHUNK_DOCUMENTS, lambda *window: lambda: encode_window(*window))
