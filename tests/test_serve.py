"""The server: OpenAI's own client gets what the engine alone makes; bad requests end in clear errors."""

import errno
import fcntl
import http.client
import io
import json
import os
import resource
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import tokenizers
import torch
from conftest import ROOT
from transformers import PreTrainedTokenizerFast

import checkpoint
import serve
from config import ConfigError
from data import DataConfig
from process.run_folder import write_settings
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig
from serve import ServeConfig, ServeFile, Service
from server import loop
from server.endpoint import Handler
from server.wire import Answers, Ask, Chat, Piece, Writer
from settings import Config

pytestmark = pytest.mark.slow  # processes and whole runs

LIMIT = 64  # response tokens
ROLLOUT = RolloutConfig(max_prompt_tokens=64, max_response_tokens=LIMIT, kv_gib=0.01, max_running=16)
PROMPT = "31?"


@pytest.fixture(scope="module")
def loud_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return folders of models whose every token depends on the whole context: without noise, and with it."""

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp("loud") / f"loud{seed}"
        model = checkpoint.load_model(tiny_folder, torch.device("cpu"), torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(5).add_(0.05 * torch.randn(weight.shape, generator=generator))
        checkpoint.save_model(folder, model, tiny_folder)
        return folder

    return make


@pytest.fixture(scope="module")
def folder(loud_folder) -> Path:
    return loud_folder(0)


class Gate:
    """Lets an engine take as many steps as it is told."""

    def __init__(self, engine: Engine):
        self.step, self.permits = engine.step, threading.Semaphore(0)
        engine.step = self

    def __call__(self):
        self.permits.acquire()
        return self.step()

    def open(self, steps: int = 10**6) -> None:
        for _ in range(min(steps, 10**4)):
            self.permits.release()


@pytest.fixture
def served(folder) -> Iterator[Callable[..., Any]]:
    """Start a server; keywords are those of ServeConfig."""
    started: list[tuple[Any, threading.Thread]] = []

    def start(token: str = "", gated: bool = False, **settings) -> Any:
        config = ServeFile(ServeConfig(**{"port": 0, "device": "cpu", "name": "tiny"} | settings), ROLLOUT)
        service: Any = Service(config, folder, token)
        service.gate = Gate(service.engine) if gated else None
        thread = threading.Thread(target=service.run)
        thread.start()
        started.append((service, thread))
        return service

    yield start
    for service, thread in started:
        service.stop()
        if service.gate:
            service.gate.open()
        thread.join(60)
        assert not thread.is_alive()


def client_of(service: Service, key: str = "none") -> Any:  # untyped: it has our fields too
    return openai.OpenAI(base_url=service.address, api_key=key, max_retries=0, timeout=300)


def engine_of(folder: Path, sampling: SamplingConfig) -> Engine:
    model, tokenizer = (
        checkpoint.load_model(folder, torch.device("cpu"), torch.float32),
        checkpoint.load_tokenizer(folder),
    )
    ends = checkpoint.eos_ids(folder, tokenizer, model.shape.vocab_size)
    return Engine(model, ROLLOUT, sampling, ends, tokenizer)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(service: Service, path: str, body: object, **headers: str) -> tuple[int, dict]:
    """POST without a client: return status and answer."""
    connection = http.client.HTTPConnection("127.0.0.1", service.endpoint.server_port, timeout=300)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"} | headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


# ---- answers -------------------------------------------------------------------------------------------------------


def test_completions_are_those_of_the_engine_alone(served, folder) -> None:
    """Several requests at once, each with its own sampling: tokens, log-probs, text and ends."""
    client, prompts = client_of(served()), ["31?", "7", [49, 50, 51]]
    kinds = [SamplingConfig(), SamplingConfig(0.0), SamplingConfig(0.7, 5), SamplingConfig(1.3, top_p=0.8)]

    def complete(seed: int):
        kind = kinds[seed % 4]
        extra = {"return_token_ids": True, "top_k": kind.top_k}
        prompt = [prompts[0], prompts[1]] if seed % 2 else prompts[2]
        known = {"temperature": kind.temperature, "top_p": kind.top_p, "n": 2, "max_tokens": 40, "logprobs": 0}
        return client.completions.create(model="tiny", prompt=prompt, seed=seed, extra_body=extra, **known)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(complete, range(8)))
    tokenizer = checkpoint.load_tokenizer(folder)
    for seed, answer in enumerate(answers):
        engine, own = engine_of(folder, kinds[seed % 4]), prompts[:2] if seed % 2 else prompts[2:]
        expected = [sample for samples in engine.generate(own, 2, seed, max_new_tokens=40) for sample in samples]
        for choice, sample in zip(answer.choices, expected, strict=True):
            assert choice.token_ids == list(sample.token_ids)
            # Rounding, which depends on the batch, may take a token at the edge of top_p in, and all others get less.
            edges = 0.02 if kinds[seed % 4].top_p < 1 else 1e-4
            assert choice.logprobs.token_logprobs == pytest.approx(list(sample.logprobs), abs=edges)
            assert choice.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert choice.finish_reason == sample.finish_reason
            assert choice.spans == [{"start": 0, "end": len(sample.token_ids), "version": 0}]
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in own]
        assert [choice.prompt_token_ids for choice in answer.choices] == [prompt for prompt in ids for _ in range(2)]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in expected)


@pytest.mark.parametrize("stop", [None, ["7", "1"]])
def test_a_stream_is_the_whole_in_pieces(served, stop, monkeypatch) -> None:
    monkeypatch.setattr(loop, "STREAM_SECONDS", 0.0)
    client, messages = client_of(served()), [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    body = {"model": "tiny", "messages": messages, "n": 3, "seed": 4, "logprobs": True, "stop": stop}
    extra = {"extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**body, **extra)
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    ends: dict[int, str | None] = {}
    chunks = list(client.chat.completions.create(**body, **extra, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        i = choice.index
        texts[i] = texts.get(i, "") + choice.delta.content
        ids[i] = ids.get(i, []) + choice.token_ids
        logprobs[i] = logprobs.get(i, []) + [token.logprob for token in choice.logprobs.content]
        ends[i] = choice.finish_reason
    for choice in whole.choices:
        i = choice.index
        assert (texts[i], ids[i], ends[i]) == (choice.message.content, choice.token_ids, choice.finish_reason)
        assert logprobs[i] == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-4)
        assert len(ids[i]) == len(logprobs[i])
    if stop:
        assert not any(text in choice.message.content for choice in whole.choices for text in stop)
        assert "stop" in ends.values()


def test_a_stop_text_ends_the_text_before_it(served, folder) -> None:
    client, body = client_of(served()), {"model": "tiny", "prompt": PROMPT, "seed": 1, "max_tokens": LIMIT}
    free = client.completions.create(**body, extra_body={"return_token_ids": True}).choices[0]
    printable = [i for i in range(2, len(free.text) - 1) if free.text[i : i + 2].isascii()]
    stop = free.text[printable[0] : printable[0] + 2]
    cut = client.completions.create(**body, stop=stop, extra_body={"return_token_ids": True}).choices[0]
    assert cut.text == free.text[: free.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < len(free.token_ids)


def test_text_does_not_depend_on_how_tokens_come(folder) -> None:
    tokenizer = checkpoint.load_tokenizer(folder)
    ids = tokenizer.encode("a–b € END of it, EN", add_special_tokens=False) + [200, 226, 130]
    for stop in ((), ("END",), (" it", "EN of"), ("no such",)):
        whole = Writer(tokenizer, stop).add(ids, True)
        for size in (1, 2, 3, 7):
            writer, parts = Writer(tokenizer, stop), [ids[i : i + size] for i in range(0, len(ids), size)]
            texts = [writer.add(part, i == len(parts) - 1) for i, part in enumerate(parts)]
            assert "".join(texts) == whole, (stop, size)
    assert Writer(tokenizer, ("END",)).add(ids, True) == "a–b € "


def word_tokenizer(*words: str) -> Any:
    """Return a tokenizer whose words begin with a space, which its first one loses; 0 is a special token."""
    vocabulary = {"</s>": 0, "<unk>": 1} | {word: 2 + i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_a_word_behind_a_special_token_keeps_its_space() -> None:
    tokenizer = word_tokenizer("a", "▁b")
    whole, writer = Writer(tokenizer, ()).add([2, 0, 3], True), Writer(tokenizer, ())
    assert whole == "a b" and "".join(writer.add([id], id == 3) for id in (2, 0, 3)) == whole


def test_the_tokens_of_logprobs_join_to_the_text(folder) -> None:
    words, bytewise = word_tokenizer("▁a", "▁b", "c"), checkpoint.load_tokenizer(folder)
    encoded = bytewise.encode("é €", add_special_tokens=False)
    for tokenizer, ids, last in ((words, [2, 3, 4, 2], " a"), (bytewise, encoded, "€")):
        asked = Ask(True, ((2,),), 1, 0, (), SamplingConfig(), None, True, False, True, False)
        for size in (1, 2, len(ids)):
            answers, text, tokens = Answers(asked, 0, "", tokenizer), "", list[Any]()
            for i in range(0, len(ids), size):
                piece = Piece(0, ids[i : i + size], [0.0] * len(ids[i : i + size]), "stop" * (i + size >= len(ids)))
                chunk: Any = answers.chunk(piece)
                choice = chunk["choices"][0]
                text += choice["delta"]["content"]
                tokens += choice["logprobs"]["content"]
            assert "".join(token["token"] for token in tokens) == text == tokenizer.decode(ids) and len(text) > 2
            assert len(tokens) == len(ids) and tokens[-1]["token"] == last
            assert bytes(b for token in tokens for b in token["bytes"]).decode() == text


# ---- errors and limits ---------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "1"}]}
BAD = [
    ("/v1/completions", b"{", 400, "not JSON"),
    ("/v1/completions", [], 400, "not an object"),
    ("/v1/completions", b"[" * 200_000, 400, "in one another"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "'prompt' has half of a surrogate pair"),
    ("/v1/completions", {}, 400, "prompt = None must be"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt = "),
    ("/v1/completions", {"prompt": [True]}, 400, "prompt = "),
    ("/v1/completions", {"prompt": []}, 400, "prompt = "),
    ("/v1/completions", {"prompt": [10**9]}, 400, "prompt 0 holds something else than the token ids"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt 0 has 0 prompt tokens"),
    ("/v1/completions", {"prompt": "1" * 99}, 400, "rollout.max_prompt_tokens = 64"),
    ("/v1/completions", {"prompt": "1" * 10**6}, 400, "far too many"),
    ("/v1/completions", {"prompt": "1", "max_tokens": 10**6}, 400, "max_tokens = 1000000 is over rollout.max_response"),
    ("/v1/completions", {"prompt": "1", "max_tokens": 0}, 400, "max_tokens = 0"),
    ("/v1/completions", {"prompt": "1", "temperature": "hot"}, 400, "temperature = 'hot' must be a number"),
    ("/v1/completions", {"prompt": "1", "temperature": float("nan")}, 400, "not a finite number"),
    ("/v1/completions", {"prompt": "1", "top_p": 0}, 400, "top_p = 0.0 is too small"),
    ("/v1/completions", {"prompt": "1", "n": 999}, 400, "serve.queue"),
    ("/v1/completions", {"prompt": "1", "seed": 1.5}, 400, "seed"),
    ("/v1/completions", {"prompt": "1", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "1", "logprobs": 5}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "1", "echo": True}, 400, "echo = True is not among"),
    ("/v1/completions", {"prompt": "1", "temprature": 1}, 400, "unknown field 'temprature'"),
    ("/v1/completions", {"prompt": "1", "model": "gpt"}, 404, "the model here is 'tiny'"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400, "content"),
    ("/v1/chat/completions", CHAT | {"tools": [{}]}, 400, "is not among"),
    *(
        ("/v1/chat/completions", {"messages": [{"role": role, "content": "1", key: "x"}]}, 400, f"leave {key} out")
        for role, key in (("assistant", "tool_calls"), ("tool", "tool_call_id"))
    ),
    ("/v1/chat/completions", CHAT | {"prompt": "1"}, 400, "unknown field 'prompt'"),
    ("/v1/embeddings", {}, 404, "nothing is at"),
    ("/weights", {"folder": "x"}, 403, "token"),
]


def test_bad_requests_get_one_clear_error(served) -> None:
    service = served(queue=64)
    for path, body, status, text in BAD:
        got, answer = ask(service, path, body)
        assert got == status and text in answer["error"]["message"], (body, got, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert text != "top_p = 0.0 is too small" or answer["error"]["param"] == "top_p"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client_of(service).completions.create(model="tiny", prompt="1", temperature=-1)
    assert service.loop.under_way == 0
    good = {"prompt": "1", "presence_penalty": 0, "top_k": None, "user": "me", "max_tokens": 2}
    assert ask(service, "/v1/completions", good)[0] == 200


def test_null_is_as_good_as_nothing(served) -> None:
    service, limit = served(), {"max_tokens": 2, "max_completion_tokens": None}
    status, answer = ask(service, "/v1/chat/completions", CHAT | limit | {"model": None})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] <= 2


def test_bodies_and_names_of_others_are_refused(served) -> None:
    service = served(max_mib=0.001)
    assert ask(service, "/v1/completions", {"prompt": "1" * 2000})[0] == 413
    assert ask(service, "/v1/completions", {"prompt": "1"}, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(service, "/v1/completions", {"prompt": "1"}, Host="evil.example:80")[0] == 403
    assert ask(service, "/v1/completions", {"prompt": "1"}, **{"Content-Length": "x"})[0] == 411
    with ThreadPoolExecutor(4) as pool:  # each writes its whole body first
        for done in [pool.submit(ask, service, "/v1/completions", b"1" * 2**25) for _ in range(4)]:
            status, answer = done.result()
            assert status == 413 and "serve.max_mib" in answer["error"]["message"]
    assert ask(service, "/nothing", b"1" * 2**25)[0] == 404
    with socket.create_connection(("127.0.0.1", service.endpoint.server_port)) as plain:
        plain.sendall(b"no http at all\r\n\r\n")
        assert b'"error"' in plain.makefile("rb").read()


def test_the_smallest_nucleus_has_a_token(served) -> None:
    service, body = served(), {"prompt": PROMPT, "top_p": 1e-35, "logprobs": 0, "max_tokens": 2}
    status, answer = ask(service, "/v1/completions", body)
    assert status == 200, answer
    assert set(answer["choices"][0]["logprobs"]["token_logprobs"]) == {0.0}
    assert ask(service, "/v1/completions", body | {"logprobs": -5})[0] == 400


def test_too_many_prompts_are_refused_before_they_are_read(served, monkeypatch) -> None:
    service = served(queue=3)
    monkeypatch.setattr(type(service.tokenizer), "encode", None)
    for body in ({"prompt": ["1"] * 4}, {"prompt": ["1"] * 2, "n": 2}):
        status, answer = ask(service, "/v1/completions", body)
        assert status == 400 and "4 responses in one request are over serve.queue = 3" in answer["error"]["message"]


def test_a_model_of_any_name_is_found(served) -> None:
    client = client_of(served(name="my org/tiny 1"))
    assert client.models.retrieve("my org/tiny 1").id == "my org/tiny 1"


def test_a_body_of_a_get_is_no_request(served) -> None:
    service = served()
    hidden = b"GET /health HTTP/1.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.endpoint.server_port), timeout=60) as plain:
        plain.sendall(b"GET /v1/models HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(hidden), hidden))
        assert plain.makefile("rb").read().count(b"HTTP/1.1 200") == 1


def test_a_client_is_watched_whatever_the_number_of_its_descriptor(served) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1100:
        pytest.skip("this system has no descriptor over 1023")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 1100), most))
    try:
        first, second = socket.socketpair()
        with first, second:
            high = fcntl.fcntl(first, fcntl.F_DUPFD, 1050)
            with socket.socket(fileno=high) as own:
                handler: Any = SimpleNamespace(connection=own)
                Handler._check_client(handler)
                second.close()
                with pytest.raises(ConnectionAbortedError):
                    Handler._check_client(handler)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_only_who_has_the_token_is_served(served, folder) -> None:
    service = served(token="a-long-secret")
    for key in ("none", "a-long-secre"):
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            client_of(service, key).models.list()
        assert ask(service, "/weights", {"folder": str(folder)}, Authorization=f"Bearer {key}")[0] == 401
    client = client_of(service, "a-long-secret")
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    assert client.models.retrieve("tiny").max_model_len == 64 + LIMIT  # of ROLLOUT; the model has more positions
    for host in ("0.0.0.0", "127.example.com", ""):
        with pytest.raises(ConfigError, match="PLAINROLL_TOKEN"):
            Service(ServeFile(ServeConfig(host=host, device="cpu"), ROLLOUT), folder)
    assert all(map(serve.is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    with pytest.raises(ConfigError, match="8 characters"):
        Service(ServeFile(ServeConfig(device="cpu"), ROLLOUT), folder, "short")
    with pytest.raises(ConfigError, match="one rank"):
        Service(ServeFile(ServeConfig(device="cpu"), replace(ROLLOUT, tensor_parallel=2)), folder)
    with pytest.raises(ConfigError, match="cannot listen"):
        Service(ServeFile(ServeConfig(port=service.endpoint.server_port, device="cpu"), ROLLOUT), folder)


def test_a_full_queue_refuses_and_a_late_request_ends(served) -> None:
    service = served(gated=True, queue=3, request_seconds=2.0)
    with ThreadPoolExecutor(1) as pool:
        patient: Any = openai.OpenAI(base_url=service.address, api_key="none", max_retries=2, timeout=300)
        asked, submit = list[object](), service.loop.submit
        service.loop.submit = lambda given: (asked.append(given), submit(given))[1]
        first = pool.submit(patient.completions.create, model="tiny", prompt="1", n=3)
        until(lambda: service.loop.under_way == 3)
        with pytest.raises(openai.RateLimitError, match="serve.queue = 3"):
            client_of(service).completions.create(model="tiny", prompt="1")
        with pytest.raises(openai.InternalServerError, match="serve.request_seconds = 2") as late:
            first.result()
    assert late.value.status_code == 504 and len(asked) == 2, "it is not asked again"
    service.gate.open()
    until(lambda: service.loop.under_way == 0)
    assert ask(service, "/v1/completions", {"prompt": "1"})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_responses(served, stream) -> None:
    service = served(gated=True)
    body = json.dumps({"prompt": "1", "n": 4, "max_tokens": LIMIT, "stream": stream}).encode()
    with ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.endpoint.server_port)))
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        plain.sendall(head.encode() + body)
        until(lambda: service.loop.under_way == 4)
        service.gate.open(2)
        until(lambda: service.gate.permits._value == 0)
    until(lambda: service.loop.inbox.qsize() > 0 or service.loop.under_way == 0)  # the handler has seen it
    service.gate.open(1)
    until(lambda: service.loop.under_way == 0)
    assert service.engine.is_idle and service.engine.pages.used == 0 and not service.engine.runner.rows.own


# ---- weights -------------------------------------------------------------------------------------------------------


def test_weights_change_while_it_serves(served, folder, loud_folder, tiny_folder, tmp_path) -> None:
    """A response under way goes on with the new weights; later ones are the new model's."""
    service, other = served(token="a-long-secret", gated=True), loud_folder(1)
    client, key = client_of(service, "a-long-secret"), {"Authorization": "Bearer a-long-secret"}
    extra = {"return_token_ids": True}
    body = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": LIMIT, "extra_body": extra}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.completions.create, **body)
        until(lambda: service.loop.under_way == 1)
        service.gate.open(6)
        until(lambda: service.gate.permits._value == 0)
        swapped = pool.submit(ask, service, "/weights", {"folder": str(other)}, **key)
        until(lambda: service.loop.inbox.qsize() > 0 or service.engine.version == 1)
        service.gate.open()
        status, told = swapped.result()
        choice = running.result().choices[0]
    assert status == 200 and told["version"] == 1 and told["weights"] == str(other)
    before, after = (engine_of(f, SamplingConfig()).generate([PROMPT], 1, 3)[0][0] for f in (folder, other))
    [old, new] = choice.spans
    assert (old["version"], new["version"]) == (0, 1) and old["end"] == new["start"] >= 6
    assert choice.token_ids[: old["end"]] == list(before.token_ids[: old["end"]])
    assert choice.token_ids != list(before.token_ids)
    later = client.completions.create(**body)
    assert later.choices[0].token_ids == list(after.token_ids)
    assert client.models.retrieve("tiny").version == later.choices[0].spans[0]["version"] == 1
    status, answer = ask(service, "/weights", {"folder": str(tmp_path)}, **key)
    assert status == 400 and "config.json" in answer["error"]["message"]
    assert client.completions.create(**body).choices[0].token_ids == list(after.token_ids)


@pytest.mark.parametrize("kind", ["vocabulary", "end tokens"])
def test_weights_of_another_tokenizer_are_refused(served, folder, tmp_path, kind) -> None:
    """The server goes on to write prompts and to end responses as it began."""
    key, other = {"Authorization": "Bearer a-long-secret"}, tmp_path / "other"
    shutil.copytree(folder, other)
    path = other / ("tokenizer.json" if kind == "vocabulary" else "config.json")
    values = json.loads(path.read_text())
    if kind == "vocabulary":
        ids = values["model"]["vocab"]
        ids["1"], ids["2"] = ids["2"], ids["1"]
    else:
        values["eos_token_id"] = 49
    path.write_text(json.dumps(values))
    service = served(token="a-long-secret")
    status, answer = ask(service, "/weights", {"folder": str(other)}, **key)
    assert status == 400 and kind in answer["error"]["message"], answer
    assert service.weights.version == 0


def test_following_goes_on_where_nobody_reads_the_console(tmp_path, monkeypatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    taken, loop = list[Path](), SimpleNamespace(is_stopping=False)

    def take(folder: Path) -> None:
        taken.append(folder)
        loop.is_stopping = len(taken) == 2

    weights: Any = serve.Weights(tmp_path, None, loop, None)
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "list_checkpoints", lambda run: [run / f"step_{len(taken):06d}"])
    monkeypatch.setattr(weights, "take", take)
    monkeypatch.setattr("builtins.print", broken)
    weights.follow(tmp_path)
    assert len(taken) == 2


def test_without_a_free_descriptor_a_server_does_not_ask_all_the_time(served, monkeypatch) -> None:
    service, asked = served(), list[float]()

    def fails(self: object) -> None:
        asked.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socketserver.TCPServer, "get_request", fails)
    with socket.create_connection(("127.0.0.1", service.endpoint.server_port)):
        until(lambda: len(asked) > 3)
    assert asked[3] - asked[0] > 0.2 and Handler.disable_nagle_algorithm


def test_a_completion_without_a_limit_fits_the_server(folder) -> None:
    config = ServeFile(ServeConfig(port=0, device="cpu", name="tiny"), replace(ROLLOUT, max_response_tokens=8))
    service = Service(config, folder, "")
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert client_of(service).completions.create(model="tiny", prompt="1").usage.completion_tokens <= 8
    finally:
        service.stop()
        thread.join(60)


def test_it_follows_a_run(served, folder, loud_folder, tmp_path, monkeypatch) -> None:
    out, err = io.StringIO(), io.StringIO()  # pytest's own captures lose what is written while they are read
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.05)
    service, run = served(follow=str(tmp_path), name=""), tmp_path.name
    load, failed = checkpoint.load_model, list[Path]()

    def fails_once(folder: Path, *args: Any) -> Any:
        if not failed and folder.is_relative_to(tmp_path):
            failed.append(folder)
            raise MemoryError
        return load(folder, *args)

    monkeypatch.setattr(checkpoint, "load_model", fails_once)
    until(lambda: f"waits for the first checkpoint in {tmp_path}" in out.getvalue())
    for step, is_whole in ((1, False), (2, True), (3, False), (4, True)):
        target = tmp_path / "checkpoints" / f".step_{step}"
        source = loud_folder(step)
        target.mkdir(parents=True)
        (source / checkpoint.STATE).write_text("{}")
        names = sorted(path.name for path in source.iterdir())
        for name in names:
            (target / name).write_bytes((source / name).read_bytes())
        sums = {name: checkpoint._checksum(target / name) + (step == 3) for name in names}
        sums[f"{checkpoint.OPTIMIZER}/shard-00000.safetensors"] = 1  # left out when it was copied, as the state is
        (target / checkpoint.STATE).unlink()
        (target / checkpoint.CHECKSUMS).write_text(json.dumps(sums))
        shown = target.rename(target.with_name(f"step_{step:06d}"))
        if is_whole:
            until(partial(lambda shown: service.weights.folder == shown, shown))
            answer = client_of(service).completions.create(model=run, prompt=PROMPT, seed=0, max_tokens=LIMIT)
            own = engine_of(shown, SamplingConfig()).generate([PROMPT], 1, 0)[0][0]
            assert answer.choices[0].text == service.tokenizer.decode(own.token_ids, skip_special_tokens=True)
        else:
            until(partial(lambda shown: f"passed: {shown}" in err.getvalue(), shown))
            assert step == 1 or "damaged since it was written; copy it again" in err.getvalue()
            if step == 1:  # want of memory has passed
                until(partial(lambda shown: service.weights.folder == shown, shown))
    assert service.weights.version == 3
    assert [(model.id, model.step) for model in client_of(service).models.list()] == [(run, 4)]


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_served_as_its_run_was_trained(folder, tmp_path, monkeypatch, capsys) -> None:
    config = replace(Config(), data=DataConfig(system='"Be short."', chat_options='{"deep": true}'))
    config = replace(config, rollout=replace(config.rollout, stop=("END", "\n", "🙂")), sampling=SamplingConfig(0.5))
    write_settings(config, tmp_path)
    step = tmp_path / "checkpoints" / "step_000004"
    shutil.copytree(folder, step)
    (tmp_path / "checkpoints" / "best").symlink_to("step_000004")
    made = list[ServeFile]()

    class Served(serve.Service):
        def __init__(self, config: ServeFile, *args: Any):
            made.append(config)
            super().__init__(config, *args)
            assert (self.endpoint.name, self.weights.about()["step"]) == (Path(args[0]).name, 4)
            self.endpoint.server_close()
            raise ConfigError("seen")

    monkeypatch.setattr(serve, "Service", Served)
    plain = ["--serve.port=0", "--serve.device=cpu", "--rollout.kv_gib=0.01"]
    plain += ["--rollout.max_prompt_tokens=64", "--rollout.max_response_tokens=64"]
    assert serve.main([str(tmp_path / "checkpoints" / "best"), *plain]) == 2
    own_file = "--config", f"{tmp_path}/config.toml", "--serve.system=Hi", "--rollout.stop=X"
    assert serve.main([str(step), *plain, *own_file]) == 2
    run, own = made
    assert (run.serve.system, run.serve.chat_options) == ('"Be short."', '{"deep": true}')
    assert run.rollout.stop == ("END", "\n", "🙂") and run.sampling == own.sampling == SamplingConfig(0.5)
    assert (own.serve.system, own.rollout.stop) == ("Hi", ("X",))
    with open(tmp_path / "config.toml", "a") as file:
        file.write("[of_older_code]\nx = 1\n")
    assert serve.main([str(step), *plain]) == 2 and made[2:] == [run], "of which nothing is served"
    assert serve.main([str(step), *plain, "--serve.chat_options=x"]) == 2
    assert "error: serve.chat_options = 'x' is no JSON object" in capsys.readouterr().err


def test_chats_have_the_roles_and_the_options_that_templates_read(served) -> None:
    service = served()
    service.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'developer' %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if deep %}!{% endif %}{% if add_generation_prompt %}>{% endif %}"
    )

    def ids(*roles: str, system: str = "", **more: object) -> object:
        service.endpoint.chat = Chat(system)
        messages = [{"role": role, "content": "31"} for role in roles]
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **more}
        status, answer = ask(service, "/v1/chat/completions", body)
        return service.tokenizer.decode(answer["prompt_token_ids"]) if status == 200 else answer["error"]["message"]

    assert ids("developer", "user") == ids("system", "user") == "s31u31>"
    assert ids("user", system="7") == "s7u31>" and ids("system", "user", system="7") == "s31u31>"
    assert ids("user", chat_template_kwargs={"deep": True}) == "u31!>"
    assert "role = 'pirate' is none of" in str(ids("pirate"))
    assert "chat_template_kwargs sets tokenize" in str(ids("user", chat_template_kwargs={"tokenize": True}))
    assert "sets chat_template, a program" in str(ids("user", chat_template_kwargs={"chat_template": "x"}))


def test_the_command_refuses_in_one_line(folder, tmp_path, capsys) -> None:
    for arguments, text in (
        ([], "name one folder"),
        ([str(folder), "x"], "name one folder"),
        ([f"--serve.follow={tmp_path}"], "no checkpoint yet"),
        ([str(folder), f"--serve.follow={tmp_path}/no/run"], f"{tmp_path}/no is no folder"),
        ([str(folder), f"--serve.follow={__file__}"], f"{__file__} is no folder"),
        ([str(tmp_path)], "config.json"),
        ([str(folder), "--serve.port=x"], "serve.port"),
        ([str(folder), "--serve.host=0.0.0.0"], "PLAINROLL_TOKEN"),
    ):
        assert serve.main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and text in said, said
    assert serve.main(["--help"]) == 0 and "--serve.queue" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(folder) -> None:
    arguments = [sys.executable, "serve.py", str(folder), "--serve.port=0", "--serve.device=cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        line = process.stdout.readline()
        address = line.split()[2]
        client: Any = openai.OpenAI(base_url=address, api_key="none", timeout=300)
        answer = client.chat.completions.create(model=folder.name, messages=CHAT["messages"], max_tokens=4)
        assert answer.usage.completion_tokens <= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
