"""Requests: what is asked for (`RequestOptions`), what fits the model (`PreparedRequest`, made by `request_builder`),
and the state between two forwards (`ActiveRequest`).

Shapes: L positions of the canvas, M candidate positions of the current block, N those of them whose logits the next
forward computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.blocks import DecodingBlock, TextSegments
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.constraints.token_automaton import ConstrainedSpan, SpanCursor
from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.inference.speculation.state import SpeculationState
from diffusionlm.inference.strategy import DecodeState
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.vision.images import PlacedImage, compute_mrope_positions
from diffusionlm.vision.processor import ImageProcessor

AllowedTokens = Mapping[int, Sequence[int] | NDArray[np.int64]]
"""Position of a canvas -> the tokens that it may hold; all other positions may hold any."""
MAX_SKIPPED_STEPS = 64
"""Steps without a forward that a request takes between two forwards, so that its neighbors do not wait for them."""

TIE_DECIMALS = 5
"""Rounding in the model moves equal confidences apart by less than this."""
TopLogprobs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request has beside its tokens, config and seed."""

    max_new_tokens: int | None = None
    """New tokens of a prompt. None: as the config says."""
    allowed_token_ids: AllowedTokens = field(default_factory=dict)
    """Position -> the tokens that it may hold, as in `generate`."""
    repeated_bytes: Sequence[bytes] = ()
    """What the first token of each masked span repeats of the text before it (`TokenHealer`); a prompt has one span.
    Empty: nothing."""
    segment_starts: Sequence[int] = ()
    """Positions of a prompt where blocks are counted anew, as in `generate`."""
    is_infill: bool = False
    """The text is a canvas whose mask tokens are filled (`infill`)."""
    span_lengths: Sequence[int] = ()
    """Number of masks of each masked span of a canvas; empty: a span is all masks without a token between them."""
    is_read: bool = False
    """With ``is_infill``: one forward reads all masks. The answer is the most probable text; its log-probabilities and
    their alternatives are the exact marginals of the positions. Keys of steps, order and sampling have no effect."""
    choices: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Of a read: first position of a masked span -> token ids for the span, whose log-probabilities are computed."""
    draft_token_ids: Sequence[int] = ()
    """Of a canvas: for each of its masks the token that decoding begins with, or -1. Empty: decoding begins with masks.
    Only a strategy that can remask changes drafted tokens; a block ends when none of its positions is masked."""
    remask: float = 0.0
    """Fraction of the drafted tokens, drawn at random, that are masked again before decoding begins."""
    constraints: Sequence[TokenConstraint | None] = ()
    """What the new text has to be, as in `generate`; with ``is_infill`` one for each masked span, as in `infill`."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token -> a number that is added to its logits, before all else: tokens, confidences and log-probabilities are
    those of the biased distribution. The mask token, suppressed tokens and those that are not allowed stay
    impossible."""
    num_top_logprobs: int = 0
    """Alternatives to keep for each new token, at most 20."""
    with_canvas: bool = False
    """Each state of an engine's request has the whole canvas (`RequestState.canvas`), not the final tokens alone."""
    adapter: str | None = None
    """Name of an adapter of the engine. None: the model itself."""
    cache_salt: str = ""
    """Texts share cached keys and values only with the same salt."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the text, whose placeholders are among its tokens (`expand_images`)."""
    processor: ImageProcessor | None = None
    """Computes the patches of the images; None: there are none."""

    @property
    def segments(self) -> TextSegments:
        """Parts of the text in which blocks are counted anew."""
        return TextSegments((0, *self.segment_starts))

    @property
    def num_remasked(self) -> int:
        """Number of drafted tokens that are masked again."""
        return int(self.remask * sum(token >= 0 for token in self.draft_token_ids) + 0.5)


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True)
class PreparedRequest:
    """A request that fits the model and the settings."""

    settings: DecodingSettings
    options: RequestOptions
    seed: int
    canvas_L: NDArray[np.int64]
    """Tokens of the text, placeholders at masked positions."""
    masked_positions: NDArray[np.int64]
    """Positions to decode, ascending."""
    blocks: tuple[DecodingBlock, ...]
    text_length: int
    """Positions of the text; the last block may be decoded beyond it."""
    constrained_spans: tuple[ConstrainedSpan, ...] = ()
    known_tokens_L: NDArray[np.int64] | None = None
    """Tokens that are committed instead of the predicted ones (`prepare_known_text`). None: the text is not known."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt, or the canvas."""
        end = len(self.canvas_L) if self.options.is_infill else self.masked_positions[0]
        ids: list[int] = self.canvas_L[:end].tolist()
        return ids

    @property
    def first_stop_position(self) -> int:
        """Position of the first new token that may be a stop token; a canvas has none."""
        return 0 if self.options.is_infill else int(self.masked_positions[0]) + self.settings.config.min_new_tokens


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
    choice_logprobs: tuple[tuple[float, ...], ...] = ()
    """Of the choices of each span of a read."""
    draft_probs: tuple[Tensor, ...] = ()
    """Distributions, [V], of the tokens that the forward has drafted, on its device, if rejection verifies them."""


class ActiveRequest:
    """The state of a request that is being decoded."""

    step = 0
    """Step within the current block."""
    num_steps = 0
    """Steps of all blocks so far, including those without a forward."""
    num_forwards = 0
    stop_index: int | None = None
    """Index of the stop token in `answer_positions`."""
    choice_logprobs: tuple[tuple[float, ...], ...] = ()
    error: Exception | None = None
    """Why decoding has ended."""
    is_prepared = False
    """`output_positions` are those of the next step."""
    cached_length = 0
    """Positions whose cached keys and values do not change within the current block."""
    needs_prefill = True
    """No forward has read the current block yet."""
    num_cached_tokens = 0
    """Tokens that were in the prefix cache at the first forward."""
    arrival = 0
    """Number of requests that came before."""
    last_step: int | None = None
    """Round of its last step, or of its admission; None: it was never admitted."""
    paused_until = 0.0
    """Time before which others go ahead, by `time.perf_counter`."""
    adapter: ModelAdapter | None = None
    """An engine sets the one that has the name when the request is submitted."""
    _num_final = 0
    """Tokens of `answer_positions` from the left that are final."""

    def __init__(self, request: PreparedRequest) -> None:
        settings, masked_positions = request.settings, request.masked_positions
        self.settings, self.prepared, self.options = settings, request, request.options
        self.segments, self.masked_positions = request.options.segments, masked_positions
        self.answer_positions = masked_positions[masked_positions < request.text_length]
        self.tokens_L = request.canvas_L.copy()
        """Placeholders at masked positions."""
        self.placeholder_id = int(self.tokens_L[masked_positions[0]]) if len(masked_positions) else 0
        length = len(self.tokens_L)
        self.is_masked_L = _is_among(masked_positions, length)
        self.logprobs_L = np.full(length, np.nan)
        self.step_map_L = np.zeros(length, dtype=np.int64)
        num_top = min(request.options.num_top_logprobs, settings.model.vocab_size)
        self._top_tokens_LT = np.zeros((length, num_top), dtype=np.int64)
        self._top_logprobs_LT = np.full((length, num_top), -np.inf)
        """Those of the most probable tokens, when a position was committed; -inf where there is none."""
        self.blocks = list(request.blocks)
        """Blocks still to be decoded, the current one first."""
        self.pages: list[list[int]] = []
        """Pages of each text: with guidance there is a second one, without what was given."""
        self.page_digests: list[bytes] = []
        """Of the pages in the prefix cache."""
        self.mrope_positions_3L: NDArray[np.int64] | None = None
        """Position ids in time, rows and columns. None: there is no image, so they are the indices."""
        if request.options.images:
            self.mrope_positions_3L = compute_mrope_positions(length, request.options.images)
        self.image_features: dict[bytes, Tensor] = {}
        """Digest of an image -> its features, from the first forward on that reads it."""
        self.span_cursors = tuple(map(SpanCursor, request.constrained_spans))
        self.output_positions = self._candidate_positions = masked_positions[:0]
        """Positions whose logits the next forward computes, [N], ascending."""
        self._is_selected_M: NDArray[np.bool_] | None = None
        self._strategy = settings.strategy
        self._stop_token_ids: Collection[int] = () if self.options.is_infill else settings.stop_token_ids
        self.speculation = SpeculationState(settings) if settings.has_speculation else None
        self._place_draft()

    def _place_draft(self) -> None:
        """Begin with the drafted tokens, except for those that are masked again."""
        options = self.options
        drafted = np.flatnonzero(np.array(options.draft_token_ids, dtype=np.int64) >= 0)
        order = keyed_rng(self.prepared.seed, RngStream.DRAFT_MASKS).permutation(len(drafted))
        for index in drafted[order[options.num_remasked :]].tolist():
            self.tokens_L[self.masked_positions[index]] = options.draft_token_ids[index]
            self.is_masked_L[self.masked_positions[index]] = False
        self._skip_complete_blocks()

    def _skip_complete_blocks(self) -> None:
        """Skip blocks without masks, which a strategy that cannot remask leaves as they are."""
        while self.blocks and not (self._strategy.can_remask or self.is_masked_L[self.blocks[0].positions].any()):
            self.blocks.pop(0)

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
    def num_short_inputs(self) -> int:
        """Inputs of a step that reads the current block and the one before; with speculation, of any but the first."""
        if self.settings.config.draft_length is not None:
            return 2 * (self.settings.config.draft_length + 1)
        block_length = self.settings.config.block_length or len(self.tokens_L)
        return 2 * max(block_length, len(self.blocks[0].positions)) * self.num_texts

    @property
    def cache_salt(self) -> bytes:
        """What cached keys and values depend on besides the tokens."""
        # Of an adapter of masks they are the base's: no mask is cached.
        adapter = None if self.adapter is None or self.adapter.acts_on_masks else self.adapter.number
        return repr((self.settings.block_causal_length, adapter, self.options.cache_salt)).encode()

    @property
    def input_tokens_L(self) -> NDArray[np.int64]:
        """What forwards read: the text, with drafts of speculation in place of masks."""
        return self.tokens_L if self.speculation is None else self.speculation.place(self.tokens_L)

    @property
    def masked_inputs_L(self) -> NDArray[np.bool_]:
        """True where forwards read a mask. In blocks of one token none do: an output is that of the token before."""
        if self.speculation is not None:
            return self.is_masked_L & (np.arange(len(self.tokens_L)) >= self.speculation.first_mask)
        if self.settings.block_causal_length == 1 and self.settings.output_shift:
            return np.zeros_like(self.is_masked_L)
        return self.is_masked_L

    @property
    def output_shift(self) -> int:
        """1 if output i - 1 predicts token i of the current block."""
        is_next_token = bool(self.blocks) and self.blocks[0].is_next_token
        return int(is_next_token or self.settings.output_shift)

    def output_rows(self) -> NDArray[np.int64]:
        """Inputs whose outputs predict `output_positions`, [N]."""
        if self.speculation is not None:
            return self.speculation.output_rows()
        return self.output_positions - self.output_shift

    def draw_uniforms(self, stream: RngStream, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) for each position, as a function of (seed, position, step) alone. With speculation the
        step is that of next-token decoding, not that of a forward."""
        seed, length = self.prepared.seed, len(self.tokens_L)
        if self.speculation is None:
            return keyed_rng(seed, stream, self.num_steps).random(length)[positions]
        steps = (positions - self.masked_positions[0]).tolist()
        draws = [keyed_rng(seed, stream, step).random(length) for step in steps]
        return np.array([draw_L[position] for draw_L, position in zip(draws, positions, strict=True)])

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
        if not self.options.num_top_logprobs:
            return ()
        tokens, logprobs = self._top_tokens_LT[positions].tolist(), self._top_logprobs_LT[positions].tolist()
        rows = (zip(*row, strict=True) for row in zip(tokens, logprobs, strict=True))
        return tuple(tuple(pair for pair in row if pair[1] > -math.inf) for row in rows)

    @property
    def is_known(self) -> bool:
        """Its text is known: the tokens are committed that it has."""
        return self.prepared.known_tokens_L is not None

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
            if self.speculation is not None:
                self.output_positions = self.speculation.plan_forward(int(block_positions[0]), len(self.tokens_L))
                return True
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
        """Commit the positions that the strategy selects; mask the others again if it remasks. With speculation, commit
        the drafts that are right and the next token."""
        self.num_forwards += 1
        self.is_prepared, length = False, len(self.tokens_L)
        self.choice_logprobs = predictions.choice_logprobs
        if self.speculation is not None:
            count = self.speculation.accept(predictions.tokens_N, self._stop_token_ids, predictions.draft_probs)
            self.cached_length += max(0, count - 1)  # the last token has no keys yet
            is_selected_M = is_committed_N = np.arange(len(predictions.tokens_N)) < count
        elif self._strategy.measure is None:
            assert self._is_selected_M is not None, "prepare_step comes first"
            is_selected_M = self._is_selected_M
            is_committed_N = _is_among(self._candidate_positions[is_selected_M], length)[self.output_positions]
        else:
            confidence_M = predictions.confidence_N
            # In a text of a single token all positions are equal, because rotary embeddings are relative; rounding in
            # the model, which depends on the batch, must not break the tie.
            if (self.tokens_L == self.tokens_L[0]).all():
                confidence_M = confidence_M.round(TIE_DECIMALS)
            if deferred_token_ids := self.settings.config.defer_token_ids:
                confidence_M = np.where(np.isin(predictions.tokens_N, deferred_token_ids), -np.inf, confidence_M)
            is_selected_M = self._select_positions(confidence_M)
            is_committed_N = is_selected_M & self.is_masked_L[self.output_positions]
        positions = self.output_positions[is_committed_N]
        self.tokens_L[positions] = predictions.tokens_N[is_committed_N]
        self.logprobs_L[positions] = predictions.logprobs_N[is_committed_N]
        num_top = self._top_tokens_LT.shape[1]
        self._top_tokens_LT[positions] = predictions.top_tokens_NT[is_committed_N, :num_top]
        self._top_logprobs_LT[positions] = predictions.top_logprobs_NT[is_committed_N, :num_top]
        self.step_map_L[positions] = self.num_forwards
        self._finish_step(positions, is_selected_M)
        self._count_final_tokens()

    def _select_positions(self, confidence_M: NDArray[np.float64]) -> NDArray[np.bool_]:
        schedule, uniforms_M = self.blocks[0].unmasking_schedule, confidence_M
        if not self._strategy.is_deterministic:
            uniforms_M = self.draw_uniforms(RngStream.POSITION_ORDER, self._candidate_positions)
        return self._strategy.select_positions(
            DecodeState(
                confidence_M=confidence_M,
                is_masked_M=self.is_masked_L[self._candidate_positions],
                positions_M=self._candidate_positions,
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
            self._skip_complete_blocks()
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


def _is_among(positions: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """True at some of L positions, [L]."""
    is_among_L = np.zeros(length, dtype=np.bool_)
    is_among_L[positions] = True
    return is_among_L
