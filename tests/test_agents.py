"""Agent code as an environment: calls of OpenAI's client are the turns of an episode; what only adds is taken."""

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from environments import Episode, EpisodeError
from envs.agents import _server, from_agent

ROW = {"prompt": "2 + 2?", "answer": "4"}


def client_of(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


def complete(address: str, prompt: object, **more: Any) -> str:
    return client_of(address).completions.create(model="any", prompt=prompt, **more).choices[0].text


def chat(address: str, messages: list, **more: Any) -> str:
    return client_of(address).chat.completions.create(model="any", messages=messages, **more).choices[0].message.content


def begun(agent: Callable, row: dict = ROW, turns: int = 9) -> Episode:
    return Episode(from_agent(agent), row, seed=5, max_turns=turns)


def test_a_chat_goes_on_turn_by_turn() -> None:
    def agent(row, seed, address):
        messages = [{"role": "user", "content": "2 + 2?"}]
        for asked in ("Sure?", [{"type": "text", "text": "Really? "}]):
            messages.append({"role": "assistant", "content": chat(address, messages).strip()})
            messages.append({"role": "user", "content": asked})
        return seed + (chat(address, messages) == row["answer"])

    for prompt in ("2 + 2?", [{"role": "user", "content": "2 + 2?"}]):
        episode = begun(agent, ROW | {"prompt": prompt})
        for text in ("5 ", "\n3", "4"):
            episode.act(text)
        assert (episode.texts, episode.reward, episode.end) == (["", "Sure?", "Really? "], 6, "stop")


def test_an_answer_does_not_wait_for_the_client() -> None:
    options = []

    def agent(row, seed, address):
        place, text = urlsplit(address), row["prompt"]
        [handler] = [_server().RequestHandlerClass]
        options.append(handler.disable_nagle_algorithm)
        return float(bool(place.port and complete(address, text)))

    episode = begun(agent)
    episode.act("4")
    assert episode.reward == 1 and options == [True]


def test_a_text_goes_on_turn_by_turn() -> None:
    def agent(row, seed, address):
        text = row["prompt"] + " Think."
        text += complete(address, text, temperature=0.5, n=1) + "\nAnd?"
        complete(address, text)

    episode = begun(agent)
    for text in ("5", "4"):
        episode.act(text)
    assert (episode.texts, episode.rewards, episode.end) == ([" Think.", "\nAnd?"], [0, 0], "stop")
    assert not _server().conversations


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda at: complete(at, "3 + 3?"), "does not go on from '2 [+] 2[?]'"),
        (lambda at: complete(at, ["2 + 2?"]), "does not go on"),
        (lambda at: complete(at, "2 + 2?", n=2), "n = 2"),
        (lambda at: complete(at, "2 + 2?", logprobs=0), "logprobs = 0"),
        (lambda at: complete(at, "2 + 2?", stop=["x"]), "stop = "),
        (lambda at: chat(at, [{"role": "system", "content": "Be good."}]), "do not go on from those before"),
        (lambda at: chat(at, [{"role": "user", "content": "2 + 2?"}] * 2), "adds 1 messages"),
        (lambda at: client_of(at).embeddings.create(model="any", input="x"), "no 'embeddings' here"),
    ],
)
def test_what_makes_no_turn_is_refused(call: Callable, text: str) -> None:
    with pytest.raises(EpisodeError, match=f"turn 0: .*{text}"):
        begun(lambda row, seed, address: call(address))


def test_a_rewritten_chat_is_refused_and_the_agent_may_go_on() -> None:
    def agent(row, seed, address):
        first = [{"role": "user", "content": row["prompt"]}]
        said = chat(address, first)
        with pytest.raises(openai.BadRequestError, match="do not go on"):
            chat(address, [*first, {"role": "assistant", "content": "Other."}, {"role": "user", "content": "Sure?"}])
        chat(address, [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}])

    episode = begun(agent)
    episode.act("5")
    episode.act("4")
    assert (episode.texts, episode.end) == (["", "Sure?"], "stop")


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_call_that_a_client_repeats_gets_the_answer_once_more(is_chat: bool) -> None:
    """As OpenAI's client does after a time-out of its own."""

    def agent(row, seed, address):
        messages = [{"role": "user", "content": row["prompt"]}]
        call = partial(chat, address, messages) if is_chat else partial(complete, address, row["prompt"])
        with ThreadPoolExecutor(2) as pool:  # while the first waits, and once it has its answer
            at_once = [pool.submit(call) for _ in range(2)]
            return seed + ([*(each.result() for each in at_once), call()] == ["4"] * 3)

    episode = begun(agent)
    episode.act("4")
    assert (episode.texts, episode.reward, episode.end) == ([""], 6, "stop")


def test_an_agent_that_asks_until_it_likes_the_answer_is_refused() -> None:
    def agent(row, seed, address):
        while chat(address, [{"role": "user", "content": row["prompt"]}]) != "never":
            pass

    with pytest.raises(EpisodeError, match="do not go on"):
        begun(agent).act("4")


def test_a_text_goes_on_behind_an_empty_answer() -> None:
    def agent(row, seed, address):
        text = row["prompt"]
        while not text.endswith("4"):
            text += complete(address, text)

    episode = begun(agent)
    for text in ("", "", "4"):
        episode.act(text)
    assert (episode.texts, episode.end) == (["", "", ""], "stop")


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_a_call_that_asks_for_another_text_is_refused(more: dict) -> None:
    with pytest.raises(EpisodeError, match=f"turn 0: .*{next(iter(more))} = "):
        begun(lambda row, seed, address: chat(address, [{"role": "user", "content": "2 + 2?"}], **more))


def test_an_agent_ends_with_its_episode() -> None:
    ended, seen = threading.Event(), list[Any]()

    def agent(row, seed, address):
        seen.append(address)
        try:
            text = row["prompt"]
            while True:
                text += complete(address, text) + "?"
        except openai.APIStatusError as error:
            seen.append(error.status_code)
        ended.set()

    episode = begun(agent, turns=2)
    for text in ("5", "4"):
        episode.act(text)
    assert episode.end == "turns" and ended.wait(60) and seen[1] == 410
    place = urlsplit(seen[0])
    connection = http.client.HTTPConnection(place.netloc, timeout=60)
    connection.request("POST", f"{place.path}/completions", json.dumps({"prompt": "2 + 2?"}))
    assert connection.getresponse().status == 410


def test_a_body_of_unknown_length_is_refused() -> None:
    """In chunks it would be read as further requests."""
    server = _server()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest("POST", "/any/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, response.headers["Connection"]) == (411, "close") and b"Content-Length" in response.read()


def test_what_an_agent_raises_ends_the_episode() -> None:
    def agent(row, seed, address):
        complete(address, row["prompt"])
        raise KeyError("mine")

    episode = begun(agent)
    with pytest.raises(EpisodeError, match=r"turn 1: KeyError: 'mine' \(.*test_agents.py:\d+\)"):
        episode.act("5")
