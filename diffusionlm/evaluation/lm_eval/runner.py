"""Answers requests of lm-evaluation-harness with a model. It does not import the harness."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from config.evaluation.lm_eval import LmEvalConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.answer_decoding import AnswerRequest, decode_answers
from diffusionlm.evaluation.likelihood.scoring import (
    OptionsRequest,
    greedy_matches,
    score_documents,
    score_texts,
)
from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.inference.request_builder import prepare_request, suppress_ids_without_text
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256
"""Length of an answer if neither the task nor the settings say it, as with the harness's own models."""
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Spellings of the length of an answer, in tasks and on the command line."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k")
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "do_sample": (True, False, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "min_p": (0.0,),
    "use_cache": (True, False),
}
"""Arguments that tasks write and diffusion has no use for -> values that change nothing."""
_KEY_BITS = 62


class HarnessRequest(Protocol):
    """What is read of an `lm_eval.api.instance.Instance`."""

    doc: Any
    idx: int
    task_name: str | None
    repeats: int | None

    @property
    def args(self) -> tuple[Any, ...]: ...


OnResult = Callable[[HarnessRequest, Any], None]
"""Called with a request and its result, as soon as it is computed."""


DOCUMENTS_PER_CALL = 64
"""Documents that are scored before their results are passed on, so that an interrupted run loses little."""


def ignore_result(request: HarnessRequest, result: Any) -> None:
    """The default of `OnResult`."""


@dataclass(frozen=True)
class UniqueRequest:
    """A request that is computed: one repeat of an instance."""

    instance: HarnessRequest
    repeat: int

    @property
    def document_key(self) -> int:
        """A number that all options of a document share, of this repeat. It depends on the task and the document alone,
        so not on limits, order, neighbors or ranks."""
        return _hash_key(self.instance.task_name, self.instance.doc or self.instance.args, self.repeat)

    @property
    def document_identity(self) -> tuple[int, int | None]:
        """What the options of a document share, of this repeat, and another document with the same content does not."""
        return self.document_key, getattr(self.instance, "doc_id", None)

    def answer_seed(self, seed: int) -> int:
        """Seed of the answer, which differs between the requests of a document."""
        return _hash_key(seed, self.document_key, self.instance.idx)


def find_unique_requests(instances: Sequence[HarnessRequest]) -> tuple[list[UniqueRequest], list[int]]:
    """Number the repeats of each instance, and leave out those that only fill up a rank.

    The harness passes the same object once for each repeat. With several ranks it appends the last request again, so
    that all ranks have equally many: those are answered like its first repeats.

    Returns:
        The requests to compute, and for each instance the index of its request.
    """
    requests: list[UniqueRequest] = []
    indices: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    places = []
    for instance in instances:
        count = counts.get(id(instance), 0)
        counts[id(instance)] = count + 1
        repeat = count % (instance.repeats or 1)
        place = indices.setdefault((id(instance), repeat), len(requests))
        if place == len(requests):
            requests.append(UniqueRequest(instance, repeat))
        places.append(place)
    return requests, places


def check_cacheable(
    method: str, requests: Sequence[HarnessRequest], is_random: Callable[[HarnessRequest], bool]
) -> None:
    """Check that a request cache of the harness, which keeps one result for each text, is no loss.

    Raises:
        ValueError: a request with random results has repeats, or may have some in a later run.
    """
    for request in requests:
        if method == "generate_until":
            if is_random(request) and not request.args[1].get("do_sample"):
                raise ValueError(
                    f"task {request.task_name}: answers are random, and the request cache would give all repeats the "
                    "same: add do_sample=true to --gen_kwargs, with which they are not cached, or leave out --use_cache"
                )
        elif (request.repeats or 1) > 1:
            raise ValueError(
                f"task {request.task_name}: repeats = {request.repeats} of likelihoods would all get the same value "
                "from the request cache: leave out --use_cache"
            )


def _hash_key(*parts: object) -> int:
    text = json.dumps(parts, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _KEY_BITS)


@dataclass(frozen=True)
class GenerationArguments:
    """Arguments of ``generate_until``, in our terms."""

    until: tuple[str, ...]
    """The answer ends before the first of these texts."""
    config: GenerationConfig

    @classmethod
    def parse(cls, arguments: Mapping[str, Any], defaults: GenerationConfig) -> GenerationArguments:
        """Combine the arguments of a request with the settings of the model.

        The request's length wins. Its temperature, top_p and top_k win if they ask for sampling (do_sample = true), or
        if the settings leave them open: tasks ask for greedy decoding by default, and would overwrite the published
        settings of a model. All other keys of `GenerationConfig` may be arguments too, and win.

        Raises:
            ValueError: a key is unknown or has a value that diffusion cannot follow, spellings of the length contradict
                each other, or the settings do not fit each other.
        """
        values = dict(arguments)
        until = _parse_until(values.pop("until", None))
        limit = _pop_limit(values)
        do_sample = values.get("do_sample")
        _check_known(values)
        values = {key: value for key, value in values.items() if key not in NEUTRAL_VALUES}
        if do_sample is False:
            values.setdefault("temperature", 0.0)
        if values.get("top_k") in (0, -1):  # as vLLM and transformers spell that there is no bound
            values["top_k"] = None
        for key in SAMPLING_KEYS:
            is_set = key in defaults.model_fields_set and getattr(defaults, key) is not None
            if is_set and not do_sample:
                values.pop(key, None)
        if limit is None and defaults.max_new_tokens is None and defaults.total_length is None:
            limit = DEFAULT_NEW_TOKENS
        if limit is not None:
            values |= {"max_new_tokens": limit, "total_length": None}
        chosen = {key: getattr(defaults, key) for key in defaults.model_fields_set}
        return cls(until, GenerationConfig.model_validate({**chosen, **values}))


def _check_known(values: Mapping[str, Any]) -> None:
    """Check that no argument would be ignored.

    Raises:
        ValueError: one would; names it.
    """
    for key, value in values.items():
        if key in NEUTRAL_VALUES and value not in NEUTRAL_VALUES[key]:
            raise ValueError(f"generation argument {key} = {value!r} has no meaning for diffusion: remove it")
        if key not in NEUTRAL_VALUES and key not in GenerationConfig.model_fields:
            raise ValueError(
                f"generation argument {key} = {value!r} is unknown: remove it from the task or from --gen_kwargs; "
                f"lengths are {', '.join(LIMIT_KEYS)}, and all keys of [generation] are possible"
            )


def _parse_until(value: Any) -> tuple[str, ...]:
    """The stop strings; a single one may stand by itself, and empty ones are none."""
    texts = [value] if isinstance(value, str) else list(value or ())
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"generation argument until has {text!r}: expected a text or a list of texts")
    return tuple(dict.fromkeys(text for text in texts if text))


def _pop_limit(values: dict[str, Any]) -> int | None:
    """Remove all spellings of the length, and return it."""
    limits = {key: values.pop(key) for key in LIMIT_KEYS if key in values}
    limits = {key: limit for key, limit in limits.items() if limit is not None}
    if len(set(limits.values())) > 1:
        spelled = " and ".join(f"{key} = {limit}" for key, limit in limits.items())
        raise ValueError(f"generation arguments {spelled} contradict each other: keep one of them")
    key, limit = next(iter(limits.items()), (None, None))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"generation argument {key} = {limit!r} must be a whole number of at least 1")
    return limit


@dataclass
class RequestRunner:
    """A model with its settings."""

    model: Transformer
    tokenizer: Tokenizer
    config: LmEvalConfig
    num_truncated: int = 0
    """Contexts that have lost their first tokens."""
    _settings: dict[GenerationConfig, DecodingSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoder = PairEncoder.from_model(self.tokenizer, self.model.config)

    @property
    def max_length(self) -> int:
        return self.model.config.max_position_embeddings

    def resolve_generation(self, config: GenerationConfig) -> DecodingSettings:
        """The settings with the defaults of the model; built once.

        Raises:
            ValueError: they do not fit the model.
        """
        if config not in self._settings:
            complete = suppress_ids_without_text(config, self.tokenizer, self.model.config.vocab_size)
            self._settings[config] = resolve_settings(complete, self.model.config)
        return self._settings[config]

    def is_random(self, instance: HarnessRequest) -> bool:
        """Whether repeats of a request of ``generate_until`` give different answers.

        Raises:
            ValueError: its arguments do not fit the model.
        """
        parsed = GenerationArguments.parse(instance.args[1], self.config.generation)
        return self.resolve_generation(parsed.config).is_random

    def describe_generation(self, config: GenerationConfig) -> dict[str, Any]:
        """The settings with the defaults of the model, for results; without the ids that have no text."""
        resolved = self.resolve_generation(config).config.model_copy(
            update={"suppress_token_ids": config.suppress_token_ids}
        )
        return resolved.model_dump(mode="json", exclude_none=True)

    def generate(self, instances: Sequence[HarnessRequest], on_result: OnResult = ignore_result) -> list[str]:
        """Answer requests of ``generate_until``, in their order. All are checked before the first forward.

        Raises:
            ValueError: the arguments or the length of a request do not fit the model; names its document.
        """
        unique, places = find_unique_requests(instances)
        requests = [self._prepare(request) for request in unique]
        texts = [""] * len(unique)
        for index, answer in decode_answers(self.model, self.tokenizer, requests, self.config.batch_size):
            texts[index] = answer.text
            on_result(unique[index].instance, answer.text)
        return [texts[place] for place in places]

    def score(
        self, instances: Sequence[HarnessRequest], on_result: OnResult = ignore_result
    ) -> list[tuple[float, bool]]:
        """Answer requests of ``loglikelihood``, in their order: log-likelihoods in nats, and whether greedy decoding
        yields the continuation. All are checked before the first forward.

        Continuations of a document after the same context are its options: all exact or all sampled, with common random
        numbers. An empty continuation has probability one.

        Raises:
            ValueError: a text does not fit the model; names its document.
        """
        unique, places = find_unique_requests(instances)
        pairs = [self._encode_pair(request) for request in unique]
        documents: dict[tuple[tuple[int, int | None], tuple[int, ...]], list[int]] = {}
        continuations: dict[tuple[int, int | None], set[tuple[Any, ...]]] = {}
        for index, (request, pair) in enumerate(zip(unique, pairs, strict=True)):
            documents.setdefault((request.document_identity, pair.context_ids), []).append(index)
            continuations.setdefault(request.document_identity, set()).add(request.instance.args)
        results: dict[int, tuple[float, bool]] = {}
        groups = [(unique[indices[0]].document_key, indices) for indices in documents.values()]
        for start in range(0, len(groups), DOCUMENTS_PER_CALL):
            part = groups[start : start + DOCUMENTS_PER_CALL]
            scores = self._score_documents([(key, [pairs[index] for index in indices]) for key, indices in part])
            log_likelihoods = dict(zip((index for _, indices in part for index in indices), scores, strict=True))
            compared = [i for i in log_likelihoods if self._compares(len(continuations[unique[i].document_identity]))]
            matches = dict(zip(compared, self._match_greedily([pairs[index] for index in compared]), strict=True))
            for index, log_likelihood in log_likelihoods.items():
                results[index] = (log_likelihood, matches.get(index, False))
                on_result(unique[index].instance, results[index])
        return [results[place] for place in places]

    def roll(self, instances: Sequence[HarnessRequest], on_result: OnResult = ignore_result) -> list[float]:
        """Answer requests of ``loglikelihood_rolling``, in their order: log-likelihoods of whole texts, in nats. Each
        text is scored by itself, in disjoint windows, after the token that stands for an empty context.

        Raises:
            ValueError: a text has a token that the model cannot predict.
        """
        unique, places = find_unique_requests(instances)
        pairs = [self.encoder.encode_pair("", request.instance.args[0]) for request in unique]
        results: list[float] = []
        documents = list(zip(unique, pairs, strict=True))
        for start in range(0, len(documents), DOCUMENTS_PER_CALL):
            part = documents[start : start + DOCUMENTS_PER_CALL]
            texts = [
                OptionsRequest(pair.context_ids[-1:], (pair.continuation_ids,), request.document_key)
                for request, pair in part
                if pair.continuation_ids
            ]
            scores = iter(score_texts(self.model, texts, self.config.window, self.config.likelihood))
            for request, pair in part:
                results.append(next(scores).log_likelihood if pair.continuation_ids else 0.0)
                on_result(request.instance, results[-1])
        return [results[place] for place in places]

    def _encode_pair(self, request: UniqueRequest) -> EncodedPair:
        label = describe_request(request.instance)
        try:
            pair = self.encoder.encode_pair(*request.instance.args)
            context_ids = self._truncate(pair.context_ids, len(pair.continuation_ids), label)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        return EncodedPair(context_ids, pair.continuation_ids)

    def _compares(self, num_continuations: int) -> bool:
        """Whether the continuations of a document with so many different ones are compared with greedy decoding."""
        choice = self.config.is_greedy
        return choice == "always" or (choice == "auto" and num_continuations == 1)

    def _score_documents(self, documents: Sequence[tuple[int, Sequence[EncodedPair]]]) -> list[float]:
        """Log-likelihoods of the options of documents, one after the other; each is a key and its options."""
        requests = [
            OptionsRequest(
                pairs[0].context_ids, tuple(pair.continuation_ids for pair in pairs if pair.continuation_ids), key
            )
            for key, pairs in documents
        ]
        scores = iter(score_documents(self.model, [item for item in requests if item.options], self.config.likelihood))
        values: list[float] = []
        for (_, pairs), request in zip(documents, requests, strict=True):
            scored = iter(next(scores).log_likelihoods if request.options else ())
            values += [next(scored) if pair.continuation_ids else 0.0 for pair in pairs]
        return values

    def _match_greedily(self, pairs: Sequence[EncodedPair]) -> list[bool]:
        """Whether greedy decoding yields each continuation; an empty one it does."""
        scored = [pair for pair in pairs if pair.continuation_ids]
        requests = [OptionsRequest(pair.context_ids, (pair.continuation_ids,)) for pair in scored]
        matches = iter(greedy_matches(self.model, requests, self.config.likelihood))
        return [next(matches) if pair.continuation_ids else True for pair in pairs]

    def _prepare(self, request: UniqueRequest) -> AnswerRequest:
        context, arguments = request.instance.args
        label = describe_request(request.instance)
        try:
            parsed = GenerationArguments.parse(arguments, self.config.generation)
            settings = self.resolve_generation(parsed.config)
            prompt_ids = self.encoder.encode(context) if context else self.encoder.encode_pair("", "").context_ids
            prompt_ids = self._truncate(prompt_ids, settings.config.max_new_tokens or 1, label)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        seed = request.answer_seed(self.config.seed)
        return prepare_request(settings, prompt_ids, seed, label=label), parsed.until

    def _truncate(self, context_ids: tuple[int, ...], num_following: int, label: str) -> tuple[int, ...]:
        """Shorten a context from the left, so that the tokens after it fit into the model's context.

        Raises:
            ValueError: it is too long, and the settings do not allow to shorten it; or nothing would be left.
        """
        num_excess = len(context_ids) + num_following - self.max_length
        if num_excess <= 0:
            return context_ids
        lengths = f"{len(context_ids)} tokens and {num_following} after them"
        if num_excess >= len(context_ids):
            raise ValueError(
                f"{lengths} leave no room for a context in max_position_embeddings = {self.max_length}: "
                "let the answer be shorter (max_gen_toks)"
            )
        if self.config.truncation == "error":
            raise ValueError(
                f"{lengths} are more than max_position_embeddings = {self.max_length}: use fewer examples, or set "
                'truncation = "left"'
            )
        self.num_truncated += 1
        return context_ids[num_excess:]


def describe_request(instance: HarnessRequest) -> str:
    """Name a request in errors."""
    return f"task {instance.task_name}, document {getattr(instance, 'doc_id', None)}"
