"""Turn conversations into documents of tokens, with targets, fill and segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unicodedata import normalize

import numpy as np

from config.data import OnBadRow
from config.finetune.chat import ChatRowsConfig, TurnSelection
from diffusionlm.data.chat.formats import Conversation, Message
from diffusionlm.data.chat.templates import QUESTION, resolve_chat_template
from diffusionlm.data.packing import Document
from diffusionlm.data.reader import REPAIRED_PREFIX, ItemsFuture, ResumableReader, SkipLog, WindowedReader
from diffusionlm.data.record_source import LocatedText, shorten_repr
from diffusionlm.data.tokenization import CHUNK_DOCUMENTS
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from tokenizer import EncodedAnswer, Tokenizer, encode_answer, find_answer_ends, render_chat

Encoded = TypeVar("Encoded")

Skip = tuple[str, str]
"""Reason why something was left out or changed, by which it is counted; what is wrong with it, and the remedy."""

THOUGHTS_END = "</think>"

TOO_LONG = "longer than a row"
PROMPT_TOO_LONG = "prompt as long as a row"
REFUSED = "refused by the chat template"
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


@dataclass(frozen=True)
class Turn:
    """An answer with the tokens since the answer before it."""

    context: tuple[int, ...]
    answer: tuple[int, ...]
    """Ends with the stop token."""


class ChatEncoder:
    """Encodes conversations for rows of a fixed length.

    Args:
        block_length: of block diffusion; None: bidirectional. It selects the defaults of `turns` and `fill`.

    Raises:
        ValueError: the template does not allow to learn answers, or the fill does not fit the objective.
    """

    def __init__(
        self, records: ChatRecords, tokenizer: Tokenizer, row_length: int, block_length: int | None = None
    ) -> None:
        self.config = records.config.resolve(block_length)
        self.records, self.row_length, self.block_length = records, row_length, block_length
        self._tokenizer = tokenizer
        self._template = resolve_chat_template(self.config, tokenizer, records.key)
        if self.config.fill == "block" and block_length is None:
            raise ValueError(
                f'{records.key}.fill = "block" needs blocks: set "length:N", or objective.kind = "block_diffusion"'
            )
        header = render_chat(self._template, [QUESTION], add_generation_prompt=True)
        self._has_closed_thoughts = header.rstrip().endswith(THOUGHTS_END)
        assert tokenizer.eos_token_id is not None, "build_row_reader has checked it"
        self._fill_token_id = tokenizer.eos_token_id

    def encode(self, text: str, rng: np.random.Generator | None = None, *, is_counted: bool = False) -> list[Document]:
        """Encode the canonical text of a conversation; a preference is its chosen answer.

        Args:
            rng: selects the answer for `turns` = "one".
            is_counted: add what is left out to the counts.

        Raises:
            ValueError: the template refuses the conversation while `on_bad_row` is "raise".
        """
        conversation = Conversation.from_text(text)
        selection = self.config.turns if conversation.rejected is None else "last"
        documents, reasons = self._encode_conversation(text, conversation, selection, rng)
        if is_counted:
            self._count(text, reasons, len(documents))
        return documents

    def _count(self, text: str, reasons: Sequence[Skip], num_documents: int) -> None:
        log = self.records.skip_log
        place = f"{text.location}: " if isinstance(text, LocatedText) else ""
        num_left_out = log.num_left_out
        for reason, detail in reasons:
            log.add(reason, f"{place}{detail}")
        log.total += max(0, num_documents + log.num_left_out - num_left_out - 1)

    def _encode_answer(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, reasons: list[Skip]
    ) -> EncodedAnswer | None:
        """Encode the last message as the answer to those before it.

        Raises:
            ValueError: the template refuses it, or has it begin after the end of thoughts that the message has.
        """
        thoughts = find_thoughts(messages[-1])
        if thoughts and self._has_closed_thoughts:
            raise _ClosedThoughtsError(
                f"the answer has thoughts, {shorten_repr(thoughts)}, and the chat template ends them before answers: "
                "set template_variables.enable_thinking = true to learn them, or remove them from the data "
                "(reasoning_content, or <think> in content)"
            )
        answer = encode_answer(self._tokenizer, self._template, messages, tools=tools)
        if thoughts and answer is not None:
            written = self._tokenizer.decode(answer.answer_ids)
            if normalize("NFC", thoughts) not in normalize("NFC", written):
                detail = f"{shorten_repr(thoughts)}; name a chat.template that writes reasoning_content"
                reasons.append((NO_THOUGHTS, detail))
        return answer

    def encode_preference(self, text: str, *, is_counted: bool = False) -> tuple[Document, Document] | None:
        """Encode the chosen and the rejected answer with their prompt; None if one of them is left out.

        Args:
            is_counted: add to the counts why it is left out.

        Raises:
            ValueError: there is no rejected answer, or the template refuses the conversation while `on_bad_row` is
                "raise".
        """
        conversation = Conversation.from_text(text)
        if conversation.rejected is None:
            place = f"{text.location}: " if isinstance(text, LocatedText) else ""
            raise ValueError(
                f"{self.records.key}: {place}the conversation has no rejected answer, which "
                'objective.kind = "preference" needs: set format = "preference", and name its columns'
            )
        pair: list[Document] = []
        reasons: list[Skip] = []
        for messages in (conversation.messages, conversation.rejected):
            chat = Conversation(messages, conversation.tools)
            documents, new_reasons = self._encode_conversation(text, chat, "last", None)
            pair += documents
            reasons += new_reasons
        if is_counted:
            self._count(text, reasons[:1], len(pair) // 2)
        return (pair[0], pair[1]) if len(pair) == 2 else None

    def _encode_conversation(
        self,
        text: str,
        conversation: Conversation,
        selection: TurnSelection | None,
        rng: np.random.Generator | None,
    ) -> tuple[list[Document], list[Skip]]:
        """Return the documents, and the reasons why something was left out or changed."""
        reasons: list[Skip] = []
        try:
            chains = self._encode_turns(conversation, selection, rng, reasons)
        except ValueError as error:
            if self.records.on_bad_row == "raise":
                place = f"{text.location}: " if isinstance(text, LocatedText) else ""
                template = f'template "{self.config.template}": ' if self.config.template else ""
                raise ValueError(
                    f'{self.records.key}: {place}{template}{error}; set on_bad_row = "skip" beside chat to leave such '
                    "conversations out and count them"
                ) from error
            return [], [(THOUGHTS if isinstance(error, _ClosedThoughtsError) else REFUSED, str(error))]
        documents = [self._build_document(turns, reasons) for turns in chains]
        return [document for document in documents if document is not None], reasons

    def _encode_turns(
        self,
        conversation: Conversation,
        selection: TurnSelection | None,
        rng: np.random.Generator | None,
        reasons: list[Skip],
    ) -> list[list[Turn]]:
        """Encode the selected answers: the turns of each document."""
        messages = conversation.messages
        positions = conversation.learned_answers
        if messages[-1]["role"] != "assistant":
            reasons.append((UNANSWERED, "messages after the last answer"))
        match selection:
            case "last":
                positions = positions[-1:]
            case "one" if rng is not None:
                positions = [positions[int(rng.integers(len(positions)))]]
        answers = [
            answer
            for position in positions
            if (answer := self._encode_answer(messages[: position + 1], conversation.tools, reasons)) is not None
        ]
        if not answers:
            reasons.append((NOT_LEARNED, "the template marks the answers to learn, and none of these"))
            return []
        chains = [[Turn(answer.prompt_ids, answer.answer_ids)] for answer in answers]
        if selection == "all" and len(answers) > 1:
            joined = _join_turns(answers)
            if joined is None:
                reasons.append((EXPANDED, "the template writes earlier answers otherwise than the last one"))
            else:
                chains = [joined]
        return chains

    def _build_document(self, turns: Sequence[Turn], reasons: list[Skip]) -> Document | None:
        """Concatenate the turns and add the fill; None if they do not fit."""
        tokens = [token for turn in turns for token in (*turn.context, *turn.answer)]
        is_answer = [kind for turn in turns for kind in (*[False] * len(turn.context), *[True] * len(turn.answer))]
        sizes = [len(turn.context) + len(turn.answer) for turn in turns]
        num_fill = 0
        if len(tokens) > self.row_length:
            end = next((index for index in range(self.row_length, 0, -1) if is_answer[index - 1]), 0)
            detail = f"{len(tokens):,} tokens in rows of {self.row_length:,}; raise data.row_length"
            if self.config.truncate_mode == "drop":
                reasons.append((TOO_LONG, f'{detail}, or set {self.records.key}.truncate_mode = "cut"'))
                return None
            reasons.append((CUT if end else PROMPT_TOO_LONG, detail))
            if not end:
                return None
            tokens, is_answer = tokens[:end], is_answer[:end]  # ends with an answer: a context alone teaches nothing
        else:
            num_fill = min(self._count_fill(turns[-1]), self.row_length - len(tokens))
            sizes[-1] += num_fill
        return Document(
            np.array(tokens + [self._fill_token_id] * num_fill, dtype=np.int32),
            np.array(is_answer + [True] * num_fill, dtype=np.bool_),
            np.array([False] * len(tokens) + [True] * num_fill, dtype=np.bool_),
            np.repeat(np.arange(len(turns), dtype=np.int32), sizes)[: len(tokens) + num_fill],
        )

    def _count_fill(self, turn: Turn) -> int:
        """Fill tokens after the last answer. Blocks are counted from the start of its segment."""
        if self.config.fill == "block":
            assert self.block_length is not None
            return -(len(turn.context) + len(turn.answer)) % self.block_length
        length = self.config.fill_length
        return 0 if length is None else max(0, length - len(turn.answer))


def find_thoughts(message: Message) -> str:
    """Return the reasoning of an answer: `reasoning_content`, or what its content has before `</think>`."""
    before, end, _ = message["content"].partition(THOUGHTS_END)
    thoughts: str = message.get("reasoning_content") or (before.rpartition("<think>")[2] if end else "")
    return thoughts.strip()


def _join_turns(answers: Sequence[EncodedAnswer]) -> list[Turn] | None:
    """Divide a conversation into its turns; None if a prompt does not begin with the turns before it.

    Then the model would see other tokens in training than when it answers.
    """
    ends = find_answer_ends(answers, answers[-1].prompt_ids + answers[-1].answer_ids)
    if ends is None:
        return None
    return [
        Turn(answer.prompt_ids[start:], answer.answer_ids)
        for start, answer in zip((0, *ends[:-1]), answers, strict=True)
    ]


def encode_reader(
    upstream: ResumableReader[str], encoder: ChatEncoder, seed: int, key: tuple[int, ...] = ()
) -> WindowedReader[str, Document]:
    """Read the documents of conversations. For `turns` = "one", (seed, key, epoch, index) select the answer."""
    is_random = encoder.config.turns == "one"

    def encode(text: str, place: tuple[int, int, int], is_counted: bool) -> list[Document]:
        rng = keyed_rng(seed, RngStream.ANSWER, *key, *place) if is_random else None
        return encoder.encode(text, rng, is_counted=is_counted)

    return _encode_windows(upstream, encode, encoder.records.skip_log)


def encode_pairs(
    upstream: ResumableReader[str], encoder: ChatEncoder
) -> WindowedReader[str, tuple[Document, Document]]:
    """Read the chosen and rejected conversations of preferences."""

    def encode(text: str, place: tuple[int, int, int], is_counted: bool) -> list[tuple[Document, Document]]:
        pair = encoder.encode_preference(text, is_counted=is_counted)
        return [] if pair is None else [pair]

    return _encode_windows(upstream, encode, encoder.records.skip_log)


def _encode_windows(
    upstream: ResumableReader[str],
    encode: Callable[[str, tuple[int, int, int], bool], list[Encoded]],
    skip_log: SkipLog,
) -> WindowedReader[str, Encoded]:
    """Encode window by window.

    Args:
        encode: called with a text, its place (epoch, window, index in it), and whether it is counted what is left out:
            once, in the first epoch.
    """

    def encode_window(epoch: int, index: int, texts: list[str]) -> list[Encoded]:
        return [
            item
            for position, text in enumerate(texts)
            for item in encode(text, (epoch, index, position), skip_log.is_new(epoch, (index, position)))
        ]

    def transform(epoch: int, index: int, texts: list[str]) -> ItemsFuture[Encoded]:
        return lambda: encode_window(epoch, index, texts)

    return WindowedReader(upstream, CHUNK_DOCUMENTS, transform)
