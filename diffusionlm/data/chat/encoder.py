"""Turn conversations into documents of tokens, with targets, EOS padding and segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tokenizer import EncodedAnswer, Tokenizer, encode_answers, join_answers, render_chat

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
    skip_log: SkipLog = field(default_factory=SkipLog)
    """Of the encoder. A conversation that becomes several documents counts as that many."""


class _ClosedThoughtsError(ValueError):
    """An answer has thoughts, and its prompt ends them."""


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
            ValueError: the template refuses the conversation while `on_bad_row` is "raise".
        """
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
                template = f'template "{self.config.template}": ' if self.config.template else ""
                raise ValueError(
                    f'{self.records.key}: {conversation.error_prefix}{template}{error}; set on_bad_row = "skip" beside '
                    "chat to leave such conversations out and count them"
                ) from error
            return [], [(THOUGHTS if isinstance(error, _ClosedThoughtsError) else REFUSED, str(error))]
        if not answers:
            return [], [*reasons, (NOT_LEARNED, "the template marks the answers to learn, and none of these")]
        groups = [[answer] for answer in answers]
        if selection == "all" and len(answers) > 1:
            joined = join_answers(answers)
            if joined is None:
                reasons.append((EXPANDED, "the template writes earlier answers otherwise than the last one"))
            else:
                groups = [joined]
        documents = [self._build_document(group, reasons) for group in groups]
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
    ) -> list[EncodedAnswer]:
        """Encode the answers at these positions that the template has learned.

        Raises:
            ValueError: the template refuses one, or has it begin after the end of thoughts that the message has.
        """
        thoughts = [find_thoughts(conversation.messages[position]) for position in positions]
        if self._has_closed_thoughts and any(thoughts):
            thought = next(filter(None, thoughts))
            raise _ClosedThoughtsError(
                f"the answer has thoughts, {shorten_repr(thought)}, and the chat template ends them before answers: "
                "set template_variables.enable_thinking = true to learn them, or remove them from the data "
                "(reasoning_content, or <think> in content)"
            )
        encoded = encode_answers(
            self._tokenizer, self._template, conversation.messages, positions, tools=conversation.tools
        )
        answers: list[EncodedAnswer] = []
        for answer, text in zip(encoded, thoughts, strict=True):
            if answer is None:
                continue
            written = self._tokenizer.decode(answer.answer_ids) if text else ""
            if normalize("NFC", text) not in normalize("NFC", written):
                detail = f"{shorten_repr(text)}; name a chat.template that writes reasoning_content"
                reasons.append((NO_THOUGHTS, detail))
            answers.append(answer)
        return answers

    def _build_document(self, answers: Sequence[EncodedAnswer], reasons: list[Skip]) -> Document | None:
        """Concatenate prompts and answers and add the EOS padding; None if they do not fit."""
        parts = [part for answer in answers for part in (answer.prompt_ids, answer.answer_ids)]
        sizes = [len(part) for part in parts]
        end, num_eos_padding = sum(sizes), 0
        loss_mask = np.repeat([False, True] * len(answers), sizes)
        if end > self.row_length:
            detail = f"{end:,} tokens in rows of {self.row_length:,}; raise data.row_length"
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
