"""Requests: checked before decoding (`PreparedRequest`), and their state between two forwards (`ActiveRequest`).

Shapes: L positions of the canvas, M candidate positions of the current block, N those of them whose logits the next
forward computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.blocks import (
    WHOLE_TEXT,
    DecodingBlock,
    TextSegments,
    round_if_uniform_canvas,
    split_into_blocks,
)
from diffusionlm.inference.constraints.token_automaton import ConstrainedSpan, SpanCursor
from diffusionlm.inference.settings import DecodingSettings, check_token_ids
from diffusionlm.inference.strategy import DecodeState

AllowedTokens = Mapping[int, Sequence[int] | NDArray[np.int64]]
"""Position of a canvas -> the tokens that it may hold; all other positions may hold any."""
MAX_SKIPPED_STEPS = 64
"""Steps without a forward that a request takes between two rounds, so that its neighbors do not wait for them."""

TopLogprobs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class LogitBias:
    """What is added to the logits of some tokens at every position of a request."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that fits the model and the settings."""

    canvas_L: NDArray[np.int64]
    """Tokens of the text, placeholders at masked positions."""
    masked_positions: NDArray[np.int64]
    """Positions to decode, ascending."""
    blocks: tuple[DecodingBlock, ...]
    text_length: int
    """Positions of the text; the last block may be decoded beyond it."""
    seed: int
    is_infill: bool
    allowed_token_ids: Mapping[int, NDArray[np.int64]]
    """Masked position -> the tokens that it may hold."""
    segments: TextSegments = WHOLE_TEXT
    logit_bias: LogitBias | None = None
    num_top_logprobs: int = 0
    """Alternatives whose log-probabilities are kept for each new token."""
    cache_salt: str = ""
    """Texts share cached keys and values only with the same salt."""
    adapter: str | None = None
    """Name of an adapter of the decoder. None: the model itself."""
    constrained_spans: tuple[ConstrainedSpan, ...] = ()


def prepare_prompt(
    settings: DecodingSettings,
    token_ids: Sequence[int],
    seed: int = 0,
    label: str = "prompt 0",
    allowed_token_ids: AllowedTokens | None = None,
    segment_starts: Sequence[int] = (),
) -> PreparedRequest:
    """Append masks to a prompt and check it.

    Args:
        label: name of the prompt in errors.
        segment_starts: positions of the prompt where blocks are counted anew, ascending.

    Raises:
        ValueError: the prompt and the new tokens do not fit the model's context, ``total_length`` leaves no new token,
            a token id is outside the vocabulary, the seed is negative, there are fewer ``steps`` than blocks,
            ``allowed_token_ids`` names a position that is not masked or leaves one no token, or there are
            ``segment_starts`` that do not ascend within the prompt, or without block-causal attention.
    """
    context = settings.model.max_position_embeddings
    text_length = _resolve_text_length(settings, len(token_ids), label)
    segments = _check_segments(settings, segment_starts, len(token_ids), label)
    canvas_length = text_length
    if settings.block_causal_length is not None and settings.strategy.family.uses_whole_blocks:
        # SDAR decodes the last block to its end, as it was trained, and cuts it.
        last_segment = segments.starts[-1]
        num_blocks = -(-(text_length - last_segment) // settings.block_causal_length)
        canvas_length = min(last_segment + num_blocks * settings.block_causal_length, context)
    num_masked = canvas_length - len(token_ids)
    canvas_L = np.array([*token_ids, *[settings.placeholder_token_id] * num_masked], dtype=np.int64)
    masked_positions = np.arange(len(token_ids), canvas_length)
    blocks = _split(masked_positions, settings, label, segments)
    request = PreparedRequest(
        canvas_L, masked_positions, blocks, text_length, seed, False, _to_arrays(allowed_token_ids), segments
    )
    _check_request(settings, request, label)
    return request


def prepare_infill(
    settings: DecodingSettings,
    canvas_ids: Sequence[int],
    seed: int = 0,
    label: str = "canvas 0",
    allowed_token_ids: AllowedTokens | None = None,
) -> PreparedRequest:
    """Find the mask tokens of a canvas and check it.

    Raises:
        ValueError: like `prepare_prompt`, or the model has no mask token.
    """
    _check_length(len(canvas_ids), settings, label, "shorten the text or its masked spans")
    canvas_L = np.array(canvas_ids, dtype=np.int64)
    masked_positions = np.flatnonzero(canvas_L == settings.model.required_mask_token_id)
    blocks = _split(masked_positions, settings, label)
    request = PreparedRequest(
        canvas_L, masked_positions, blocks, len(canvas_L), seed, True, _to_arrays(allowed_token_ids)
    )
    _check_request(settings, request, label)
    return request


def _check_segments(
    settings: DecodingSettings, segment_starts: Sequence[int], num_tokens: int, label: str
) -> TextSegments:
    if segment_starts and settings.block_causal_length is None:
        raise ValueError(
            f'{label}: segment_starts need attention = "block_causal", and it is "{settings.config.attention}": leave '
            "them out"
        )
    try:
        return TextSegments.from_starts(segment_starts, num_tokens)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _split(
    masked_positions: NDArray[np.int64], settings: DecodingSettings, label: str, segments: TextSegments = WHOLE_TEXT
) -> tuple[DecodingBlock, ...]:
    try:
        return tuple(split_into_blocks(masked_positions, settings, segments))
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _to_arrays(allowed_token_ids: AllowedTokens | None) -> dict[int, NDArray[np.int64]]:
    return {position: np.asarray(ids, dtype=np.int64) for position, ids in (allowed_token_ids or {}).items()}


def _check_request(settings: DecodingSettings, request: PreparedRequest, label: str) -> None:
    if not isinstance(request.seed, Integral):
        raise ValueError(f"{label}: seed = {request.seed!r} is not a whole number")
    if request.seed < 0:
        raise ValueError(f"{label}: seed = {request.seed} is negative: use 0 or more")
    check_token_ids(request.canvas_L.tolist(), settings.model, label)
    if settings.model.logit_alignment == "shifted" and 0 in request.masked_positions:
        raise ValueError(
            f"{label}: this model cannot predict the first token of a text, because its output i - 1 predicts token i: "
            "begin with a token, such as end of text"
        )
    _check_allowed_tokens(settings, request.allowed_token_ids, request.masked_positions, label)


def _check_allowed_tokens(
    settings: DecodingSettings,
    allowed_token_ids: Mapping[int, NDArray[np.int64]],
    masked_positions: NDArray[np.int64],
    label: str,
) -> None:
    for position, ids in allowed_token_ids.items():
        if position not in masked_positions:
            raise ValueError(f"{label}: allowed_token_ids names position {position}, which is not masked: remove it")
        if np.isin(ids, settings.forbidden_token_ids).all():
            raise ValueError(
                f"{label}: allowed_token_ids leaves no token at position {position}: add one that is not suppressed"
            )
        check_token_ids((int(ids.min()), int(ids.max())), settings.model, f"{label}: allowed_token_ids")


def _resolve_text_length(settings: DecodingSettings, prompt_length: int, label: str) -> int:
    """Length of the prompt and the new tokens."""
    max_new_tokens, total_length = settings.config.max_new_tokens, settings.config.total_length
    if total_length is None:
        assert max_new_tokens is not None, "resolve_settings sets one of the two"
        key, text_length = f"max_new_tokens = {max_new_tokens}", prompt_length + max_new_tokens
    else:
        key, text_length = f"total_length = {total_length}", total_length
        if prompt_length >= total_length:
            raise ValueError(
                f"{label}: {prompt_length} tokens leave no new token in total_length = {total_length}: shorten the "
                "prompt or raise total_length"
            )
    remedy = f"shorten the prompt or lower {key.split()[0]}"
    _check_length(text_length, settings, f"{label} ({prompt_length} tokens) and {key}", remedy)
    return text_length


def _check_length(length: int, settings: DecodingSettings, label: str, remedy: str) -> None:
    context = settings.model.max_position_embeddings
    if length > context:
        raise ValueError(
            f"{label}: {length} tokens are more than the model's context, max_position_embeddings = {context}: {remedy}"
        )


@dataclass(frozen=True)
class Predictions:
    """A forward's predictions for the positions that were computed."""

    tokens_N: NDArray[np.int64]
    """Proposed tokens; at a committed position its own token."""
    confidence_N: NDArray[np.float64]
    logprobs_N: NDArray[np.float64]
    top_tokens_NT: NDArray[np.int64]
    """The T most probable tokens, the most probable first and the lowest id among equals."""
    top_logprobs_NT: NDArray[np.float64]


class ActiveRequest:
    """The state of a request that is being decoded."""

    constraint_seconds = 0.0
    """Time that its constraints took in its last step, less that of the rounds since then, in which it paused."""

    def __init__(self, request: PreparedRequest, settings: DecodingSettings) -> None:
        masked_positions = request.masked_positions
        self.settings, self.prepared = settings, request
        self.masked_positions = masked_positions
        self.answer_positions = masked_positions[masked_positions < request.text_length]
        self.tokens_L = request.canvas_L.copy()
        """Placeholders at masked positions."""
        self.placeholder_id = int(self.tokens_L[masked_positions[0]]) if len(masked_positions) else 0
        self.is_masked_L = np.zeros(len(self.tokens_L), dtype=np.bool_)
        self.is_masked_L[masked_positions] = True
        self.logprobs_L = np.full(len(self.tokens_L), np.nan)
        self.top_logprobs: dict[int, TopLogprobs] = {}
        """Position -> the most probable tokens, when it was committed."""
        self.step_map_L = np.zeros(len(self.tokens_L), dtype=np.int64)
        self.blocks = list(request.blocks)
        """Blocks still to be decoded, the current one first."""
        self.step = 0
        """Step within the current block."""
        self.num_steps = 0
        """Steps of all blocks so far, including those without a forward."""
        self.num_forwards = 0
        self.stop_index: int | None = None
        """Index of the stop token in `answer_positions`."""
        self._num_final = 0
        """Tokens of `answer_positions` from the left that are final."""
        self.cached_length = 0
        """Positions whose cached keys and values do not change within the current block."""
        self.needs_prefill = True
        """No forward has read the current block yet."""
        self.pages: list[list[int]] = []
        """Pages of each text: with guidance there is a second one, without what was given."""
        self.page_digests: list[bytes] = []
        """Of the pages in the prefix cache."""
        self.num_cached_tokens = 0
        """Tokens that were in the prefix cache at the first round."""
        self.arrival = 0
        """Number of requests that came before."""
        self.last_round: int | None = None
        """Round of its last step, or of its admission; None: it was never admitted."""
        self.is_prepared = False
        """`output_positions` are those of the next step."""
        self.error: Exception | None = None
        """Why decoding has ended."""
        self.span_cursors = tuple(map(SpanCursor, request.constrained_spans))
        self._strategy = settings.strategy
        self._stop_token_ids: Collection[int] = () if request.is_infill else settings.stop_token_ids
        self._deferred_token_ids = list(settings.config.defer_token_ids)
        self.output_positions = masked_positions[:0]
        """Positions whose logits the next forward computes, [N], ascending."""
        self._candidate_positions = masked_positions[:0]
        self._is_selected_M: NDArray[np.bool_] | None = None

    @property
    def num_top_logprobs(self) -> int:
        return self.prepared.num_top_logprobs

    @property
    def is_done(self) -> bool:
        return not self.blocks or self.stop_index is not None

    @property
    def has_guidance(self) -> bool:
        """Each forward also reads the text without what was given."""
        return self.settings.config.cfg_scale > 0.0

    @property
    def num_texts(self) -> int:
        return 2 if self.has_guidance else 1

    @property
    def uses_cache(self) -> bool:
        return self.settings.config.cache != "none"

    @property
    def uses_blocks(self) -> bool:
        """Keys and values are exact, so they can be computed in parts, and again."""
        return self.settings.config.cache == "block"

    @property
    def num_short_rows(self) -> int:
        """Inputs of a step that reads the current block and the one before."""
        return 2 * (self.settings.config.block_length or len(self.tokens_L)) * self.num_texts

    @property
    def cache_salt(self) -> bytes:
        """What cached keys and values depend on besides the tokens."""
        return repr((self.settings.block_causal_length, self.prepared.adapter, self.prepared.cache_salt)).encode()

    def draw_uniforms(self, stream: RngStream, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) for each position, as a function of (seed, position, step) alone."""
        return keyed_rng(self.prepared.seed, stream, self.num_steps).random(len(self.tokens_L))[positions]

    def final_positions(self) -> NDArray[np.int64]:
        """Positions of the new tokens from the left that will not change anymore, without a stop token."""
        self._count_final_tokens()
        return self.answer_positions[: self._num_final if self.stop_index is None else self.stop_index]

    def final_token_ids(self) -> list[int]:
        """The new tokens that will not change anymore, from the left, without a stop token."""
        token_ids: list[int] = self.tokens_L[self.final_positions()].tolist()
        return token_ids

    def top_logprobs_at(self, positions: NDArray[np.int64]) -> tuple[TopLogprobs, ...]:
        """The most probable tokens at committed positions; empty if the request has not asked for them."""
        if not self.num_top_logprobs:
            return ()
        return tuple(self.top_logprobs[position] for position in positions.tolist())

    def prepare_step(self) -> None:
        """Set `output_positions` for the next forward, and look for a stop token.

        At most `MAX_SKIPPED_STEPS` steps are taken without a forward; if there are more, the request `is_prepared`
        after further calls.
        """
        self.is_prepared = self._select_outputs()
        self._count_final_tokens()

    def _select_outputs(self) -> bool:
        """Set `output_positions`. Skip steps in which a strategy without a measure commits nothing; False: there are
        more of these."""
        for _ in range(MAX_SKIPPED_STEPS):
            if self.is_done:
                return True
            block_positions = self.blocks[0].positions
            masked_positions = block_positions[self.is_masked_L[block_positions]]
            candidates = block_positions if self._strategy.can_remask else masked_positions
            self._candidate_positions = self.output_positions = candidates
            if self._strategy.measure is not None:
                return True
            self._is_selected_M = self._select_positions(np.zeros(len(candidates)))
            self.output_positions = candidates[self._is_selected_M & self.is_masked_L[candidates]]
            if len(self.output_positions):
                if self.span_cursors:  # what is committed depends on the distributions of all masked positions
                    self.output_positions = masked_positions
                return True
            self._finish_step(candidates[:0], self._is_selected_M)
        return self.is_done

    def commit(self, predictions: Predictions) -> None:
        """Commit the positions that the strategy selects; mask the others again if it remasks."""
        self.num_forwards += 1
        self.is_prepared = False
        if self._strategy.measure is None:
            assert self._is_selected_M is not None, "prepare_step comes first"
            is_selected_M = self._is_selected_M
            is_committed_N = np.isin(self.output_positions, self._candidate_positions[is_selected_M])
        else:
            confidence_M = round_if_uniform_canvas(predictions.confidence_N, self.tokens_L)
            if self._deferred_token_ids:
                confidence_M = np.where(np.isin(predictions.tokens_N, self._deferred_token_ids), -np.inf, confidence_M)
            is_selected_M = self._select_positions(confidence_M)
            is_committed_N = is_selected_M & self.is_masked_L[self.output_positions]
        positions = self.output_positions[is_committed_N]
        self.tokens_L[positions] = predictions.tokens_N[is_committed_N]
        self.logprobs_L[positions] = predictions.logprobs_N[is_committed_N]
        if self.num_top_logprobs:
            self._keep_top_logprobs(predictions, is_committed_N)
        self.step_map_L[positions] = self.num_forwards
        self._finish_step(positions, is_selected_M)
        self._count_final_tokens()

    def _keep_top_logprobs(self, predictions: Predictions, is_committed_N: NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(is_committed_N).tolist():
            tokens = predictions.top_tokens_NT[index].tolist()
            logprobs = predictions.top_logprobs_NT[index].tolist()
            pairs = zip(tokens[: self.num_top_logprobs], logprobs[: self.num_top_logprobs], strict=True)
            self.top_logprobs[int(self.output_positions[index])] = tuple(
                (token, logprob) for token, logprob in pairs if logprob > -np.inf
            )

    def _select_positions(self, confidence_M: NDArray[np.float64]) -> NDArray[np.bool_]:
        schedule, uniforms_M = self.blocks[0].unmasking_schedule, confidence_M
        if not self._strategy.is_deterministic:
            uniforms_M = self.draw_uniforms(RngStream.POSITION_ORDER, self._candidate_positions)
        return self._strategy.select_positions(
            DecodeState(
                confidence_M=confidence_M,
                is_masked_M=self.is_masked_L[self._candidate_positions],
                uniforms_M=uniforms_M,
                schedule_value=schedule[self.step],
                step=self.step,
                num_steps=len(schedule),
            )
        )

    def _finish_step(self, committed_positions: NDArray[np.int64], is_selected_M: NDArray[np.bool_]) -> None:
        self.is_masked_L[committed_positions] = False
        if self._strategy.can_remask:
            candidates = self._candidate_positions
            remasked_positions = candidates[~is_selected_M & ~self.is_masked_L[candidates]]
            self.tokens_L[remasked_positions] = self.placeholder_id
            self.is_masked_L[remasked_positions] = True
            self.logprobs_L[remasked_positions] = np.nan
        self.step += 1
        self.num_steps += 1
        block = self.blocks[0]
        is_complete = not self.is_masked_L[block.positions].any()
        if self.step == len(block.unmasking_schedule) if self._strategy.can_remask else is_complete:
            assert is_complete, "the last step of a schedule commits every position"
            self.blocks.pop(0)
            self.step, self.needs_prefill = 0, True

    def _count_final_tokens(self) -> None:
        """Count the new tokens from the left that are final, and set `stop_index` if one of them is a stop token. Looks
        at the tokens since the last call and at the current block only."""
        if self.stop_index is not None:
            return
        end = len(self.answer_positions)
        if self.blocks:
            positions = self.blocks[0].positions
            # What a strategy may still mask again is not final until its block is complete.
            is_open_M = np.ones_like(positions, np.bool_) if self._strategy.can_remask else self.is_masked_L[positions]
            end = int(np.searchsorted(self.answer_positions, positions[is_open_M.argmax()]))
        if end == self._num_final:
            return
        new_tokens: list[int] = self.tokens_L[self.answer_positions[self._num_final : end]].tolist()
        stops = (index for index, token in enumerate(new_tokens) if token in self._stop_token_ids)
        if (first_stop := next(stops, None)) is not None:
            self.stop_index = self._num_final + first_stop
        self._num_final = end
