"""The config of ``diffusionlm-serve``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, model_validator

from config.base import (
    ConfigPath,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    TupleOf,
    check_distinct,
)
from config.generation import GenerationConfig
from config.infer import InferModelConfig

DEFAULT_SCHEMA_DEPTH = 4
"""Default of `ServeSection.max_schema_depth`, also of constraints outside of a server."""

PositiveBytes = Annotated[ByteSize, Field(gt=0)]
"""A number of bytes, or a text with a unit: "2GiB" (2^30), "500MB" (10^6)."""


class EngineLimits(Section):
    """Limits of an engine in memory and in a step; keys of ``[serve]``, and arguments of `diffusionlm.Engine`."""

    cache_memory: PositiveBytes = ByteSize(1 << 30)
    """Memory of keys and values, as bytes or as a text such as "2GiB". A request that can never fit is refused."""
    page_size: PositiveInt | None = None
    """Positions of a page of the cache. None: 16, or more, so that it is a multiple of the model's block length."""
    prefix_cache: bool = True
    """Share keys and values of texts that begin alike."""
    deterministic: bool = False
    """On a CPU: log-probabilities are the same bits, whatever is decoded at the same time; slower."""
    tensor_parallel: PositiveInt = 1
    """Processes that divide the model, each with its part of the weights and of cache_memory; on a GPU each has one."""
    max_requests: PositiveInt = 64
    """Requests that are decoded at a time; each of the `n` choices of a prompt is one."""
    max_waiting: PositiveInt = 256
    """Requests that wait beyond these; the next one is refused (429)."""
    max_num_batched_tokens: PositiveInt = 2048
    """Inputs of a forward, beyond which long prompts are read in parts."""

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.tensor_parallel > 1 and self.deterministic:
            raise ValueError("deterministic = true computes in one process: set tensor_parallel = 1, or leave it out")
        return self


class ServeSection(EngineLimits):
    """``[serve]``: the address, who may use it, the limits of a request and of all together."""

    host: NonEmptyStr = "127.0.0.1"
    """Address to listen at. 127.0.0.1: this machine only. 0.0.0.0: all networks; set api_keys_file then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at. 0: a free one, which the first line of the log names."""
    model_name: NonEmptyStr | None = None
    """Name of the model in requests. None: the name of its directory."""
    api_keys_file: ConfigPath | None = None
    """File of keys, one per line; empty lines and those that begin with # are skipped. With it every route but /health
    and the page at / needs `Authorization: Bearer KEY`, and texts share cached keys and values only with those of the
    same key. None: no key is needed."""
    adapter_directory: ConfigPath | None = None
    """Directory whose PEFT adapters clients may load and unload (POST /v1/load_lora_adapter, /v1/unload_lora_adapter).
    None: they may not."""
    max_adapters: PositiveInt = 32
    """Adapters at a time, beyond which none is loaded from adapter_directory."""
    chat_template: NonEmptyStr | None = None
    """Name of a built-in chat template (chatml, qwen3, llama3, llada), a file with Jinja, or a directory with a
    tokenizer. None: the checkpoint's own."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Fields of a request that are unknown or not supported. refuse: an error names them. ignore: they are dropped, as
    vLLM does, and the log names each once."""
    token_healing: bool = True
    """Take back the last token of a prompt and let the first new token begin with its text, as in diffusionlm-infer;
    a request may turn it off."""
    default_max_tokens: PositiveInt = 256
    """New tokens of a request that does not name a number, or as many as fit into the context."""
    max_tokens: PositiveInt | None = None
    """Largest number of new tokens of a request. None: the model's context."""
    max_steps: PositiveInt = 4096
    """Largest `steps` and `denoising_steps` of a request."""
    max_total_steps: PositiveInt = 32768
    """Largest number of steps that `steps` or `denoising_steps` schedules for a choice, in all its blocks together."""
    max_alternatives: PositiveInt = 131072
    """Largest number of log-probabilities of alternatives in a response: choices x new tokens x alternatives.
    Of a read also the tokens of all its choices."""
    max_prompt_logprobs: NonNegativeInt = 1024
    """Largest number of tokens of the prompts of a request whose log-probabilities are computed: a forward each, unless
    the model is autoregressive. 0: none are."""
    max_prompts: PositiveInt = 64
    """Largest number of prompts of a request."""
    max_choices: PositiveInt = 16
    """Largest `n` of a request."""
    max_images: PositiveInt = 16
    """Largest number of images of a chat. Each takes as many positions of the context as the processor gives it."""
    max_masked_spans: PositiveInt = 256
    """Largest number of masked spans of a request."""
    max_constraints: PositiveInt = 32
    """Largest number of different constraints of a request with masked spans."""
    max_constraint_states: PositiveInt = 16384
    """Largest number of states of the automaton of a constraint, and of those of all masked spans together."""
    max_schema_depth: Annotated[int, Field(ge=1, le=8)] = DEFAULT_SCHEMA_DEPTH
    """Levels of a JSON schema within itself (a recursive `$ref`), and of objects and arrays in a value of any kind.
    Deeper values are not written."""
    max_stop_strings: PositiveInt = 16
    """Largest number of stop strings of a request."""
    max_body: PositiveBytes = ByteSize(16 << 20)
    """Largest body of a request with its images, which base64 makes a third larger, as bytes or as a text; a larger one
    is refused (413)."""
    max_header: PositiveBytes = ByteSize(1 << 16)
    """Largest request line and headers together, as bytes or as a text."""
    max_connections: PositiveInt = 1024
    """Connections at a time; beyond them only /health and /metrics are answered, all else is refused (503)."""
    keep_alive_seconds: PositiveFloat = 5.0
    """Time that a connection stays open for the next request. Longer than that of a proxy before the server, which
    otherwise sends requests over connections that are being closed."""
    header_timeout_seconds: PositiveFloat = 10.0
    """Time for the headers of a request."""
    body_timeout_seconds: PositiveFloat = 60.0
    """Time for the body of a request."""
    write_timeout_seconds: PositiveFloat = 60.0
    """Time in which a client has to read some 100 kB of what is ready for it, or all; otherwise its request ends."""
    drain_timeout_seconds: PositiveFloat = 30.0
    """After SIGTERM or Ctrl-C: time for the requests that were accepted. Those that are not done end with an error."""
    stall_seconds: PositiveFloat = 300.0
    """Time of a forward, and of what belongs to it, after which /health is 503 until it ends. Longer than the largest
    forward takes (`max_num_batched_tokens`), so that a supervisor does not end a server that works."""
    log_requests: bool = True
    """Write a line per request: status, counts of tokens and forwards, duration; never a text."""


class AdapterEntry(Section):
    """``[[adapters]]``: an adapter (LoRA) that is served as a model of its own, beside the base."""

    name: NonEmptyStr
    """Name of the model in requests."""
    path: ConfigPath
    """Directory of a PEFT adapter of the model."""


class ServeConfig(Section):
    """The config of one call of ``diffusionlm-serve``."""

    model: InferModelConfig = InferModelConfig()
    adapters: TupleOf[AdapterEntry] = ()
    serve: ServeSection = ServeSection()
    generation: GenerationConfig = GenerationConfig()
    """Settings of requests that do not set them."""

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        check_distinct({"adapters.name": [adapter.name for adapter in self.adapters]})
        if (self.adapters or self.serve.adapter_directory is not None) and self.model.adapter is not None:
            key = "[[adapters]]" if self.adapters else "serve.adapter_directory"
            raise ValueError(f"model.adapter and {key} exclude each other: name all adapters in [[adapters]]")
        if self.model.attention_backend in ("tiled", "flex"):
            raise ValueError(
                f'model.attention_backend = "{self.model.attention_backend}" has no cached form: use "auto", "eager" '
                'or "sdpa"'
            )
        if self.generation.max_new_tokens is not None or self.generation.total_length is not None:
            raise ValueError(
                "generation.max_new_tokens and total_length have no effect on a server: set serve.default_max_tokens"
            )
        return self
