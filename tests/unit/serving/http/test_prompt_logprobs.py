"""Log-probabilities of prompts: those of forwards by hand, in the forms of OpenAI (`echo`) and vLLM."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch

from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer
from tokenizer import CHAT_TEMPLATES, Tokenizer, encode_chat

TEXTS = ["the cat sat on", "the mat was flat, é"]


def score_by_hand(server: RunningServer, ids: list[int]) -> list[torch.Tensor]:
    """Log-probabilities [V] at each position: of a forward of the tokens on its left, and masks."""
    model, mask, rows = server.model, server.model.config.required_mask_token_id, []
    shift = int(model.config.logit_alignment == "shifted")
    for position in range(shift, len(ids)):
        canvas = torch.tensor([[*ids[:position], *[mask] * (len(ids) - position)]])
        with torch.no_grad():
            logits_V = model(canvas, pattern=BlockCausal(model.config.block_length or 1))[0, position - shift].double()
        logits_V[mask] = -torch.inf
        rows.append(logits_V.log_softmax(0))
    return rows


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoes(client: openai.OpenAI, server: RunningServer, max_tokens: int) -> None:
    """As lm-evaluation-harness reads them: the likelihood of the end of a prompt, and whether it is the greedy one."""
    prompts = [server.tokenizer.encode(text) for text in TEXTS]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True, n=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 4 * max_tokens
    for choice in answer.choices:
        text, ids = TEXTS[choice.index // 2], prompts[choice.index // 2]
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
        assert "".join(logprobs.tokens) == choice.text and choice.text.startswith(text)
        assert len(logprobs.tokens) == len(ids) + max_tokens and choice.finish_reason == "length"
        offsets = [len("".join(logprobs.tokens[:number])) for number in range(len(logprobs.tokens))]
        assert logprobs.text_offset == offsets
        rows = score_by_hand(server, ids)
        expected = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
        assert logprobs.token_logprobs[: len(ids)] == pytest.approx(expected, abs=1e-4)
        for row, logprob, top in zip(rows, logprobs.token_logprobs, logprobs.top_logprobs or (), strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert (logprob == max(top.values())) == (logprob > float(row.max()) - 1e-4)


def check_entries(server: RunningServer, entries: list[Any], ids: list[int]) -> None:
    """vLLM's form: of each token its own entry, and those of the three most probable ones."""
    for token, entry, row in zip(ids, entries, score_by_hand(server, ids), strict=True):
        order = row.argsort(descending=True).tolist()
        assert next(iter(entry)) == str(token) and {*entry} == {str(other) for other in (token, *order[:3])}
        for other, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(other)]), abs=1e-4)
            rank = order.index(int(other)) + 1
            assert value["rank"] == (rank if rank <= 3 else None)
            assert value["decoded_token"] == server.tokenizer.token_bytes(int(other)).decode(errors="replace")


def test_prompt_logprobs_as_of_vllm(client: openai.OpenAI, server: RunningServer) -> None:
    """Of the whole prompt as it is sent, whatever token healing takes back, beside those of the answer."""
    extra: Any = {"prompt_logprobs": 3, "return_token_ids": True}
    answer: Any = client.completions.create(model=NAME, prompt="the cat s", max_tokens=2, logprobs=1, extra_body=extra)
    ids = server.tokenizer.encode("the cat s")
    check_entries(server, answer.choices[0].prompt_logprobs, ids)
    assert answer.choices[0].prompt_token_ids != ids and len(answer.choices[0].logprobs.tokens) == 2
    messages: Any = [{"role": "user", "content": "the cat?"}]
    chat: Any = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2, n=2, extra_body=extra)
    ids = encode_chat(server.tokenizer, CHAT_TEMPLATES["chatml"], messages, add_generation_prompt=True)
    check_entries(server, chat.prompt_logprobs, ids)
    plain = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2, n=2, seed=chat.choices[0].seed)
    assert [choice.message.content for choice in plain.choices] == [c.message.content for c in chat.choices]


def test_a_first_token_that_cannot_be_predicted(
    tiny_model: MakeModel, words: Tokenizer, start_server: StartServer
) -> None:
    """Of an autoregressive model all at once; without a token before the text it has no entry."""
    sizes: dict[str, Any] = {"vocab_size": words.vocab_size, "mask_token_id": words.mask_token_id}
    model: Transformer = tiny_model(torch.float32, **sizes, block_length=1, logit_alignment="shifted").eval()
    server = start_server(model, max_prompt_logprobs=9)
    ids = words.encode(TEXTS[0])
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 2, "echo": True, "prompt_logprobs": 0}
    choice = server.request("POST", "/v1/completions", body)[2]["choices"][0]
    expected = [float(row[token]) for row, token in zip(score_by_hand(server, ids), ids[1:], strict=True)]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is choice["logprobs"]["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
    assert others == pytest.approx(expected, abs=1e-4)
    assert [
        entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
    ] == (others)
    for tokens, status in ((9, 200), (10, 400)):
        answer = server.request("POST", "/v1/completions", {**body, "prompt": [[1] * 5, [1] * (tokens - 5)]})
        assert answer[0] == status
    assert answer[2]["error"]["param"] == "prompt_logprobs" and "serve.max_prompt_logprobs" in str(answer[2])
    server.wait_until_idle()


def test_tokens_before_every_text_are_not_in_the_echo(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestBuilder, "prefix_ids", (server.tokenizer.eos_token_id,))
    body = {"prompt": "the cat", "max_tokens": 2, "logprobs": 0, "echo": True}
    choice = server.request("POST", "/v1/completions", body)[2]["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] and choice["text"].startswith("the cat")
    assert choice["logprobs"]["text_offset"][:2] == [0, 0] and choice["logprobs"]["tokens"][0] == ""
