"""Environments made of agent code, which calls a model over HTTP as OpenAI's clients do: `from_agent`.

The rollout answers its calls. Those of an episode are the turns of one sample, which has the tokens and log-probs that
were drawn. So each call must go on with the text or the chat of the call before it, and only add to that.
"""

import json
import queue
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from core import Environment, Turns
from server.fields import NEUTRAL, asks_for

Agent = Callable[[dict, int, str], float | None]  # (row, seed, address of its model) -> reward
KINDS = ("completions", "chat/completions")
#: What a call may not ask for, with what it may say nevertheless. Sampling is the run's, whatever the call says.
REFUSED = NEUTRAL | {"stream": (False,), "logprobs": (False,), "functions": ([],), "stop": ([], ""), "n": (1,)}
MAX_REPEATS = 8  # more are no client's, but an agent that asks until it likes the answer
GONE = "the episode has ended"


class Refused(ValueError):
    """A call that no turn of the episode can answer."""


@dataclass
class Call:
    """A request of the agent, whose thread waits for the answer."""

    kind: str
    asked: dict
    answers: queue.SimpleQueue[tuple[int, str]] = field(default_factory=queue.SimpleQueue)  # (status, text or error)


class Conversation:
    """The agent of one episode: it runs in a thread of its own, and its calls come one by one."""

    def __init__(self, prompt: str | list[dict]):
        self.text = prompt if isinstance(prompt, str) else ""  # of the calls so far, with their answers
        self.messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self.calls = 0
        self.newest: tuple[Call, str] | None = None  # the newest call with an answer
        self.repeats = 0  # of it
        self.inbox: queue.SimpleQueue[Call | float | BaseException | None] = queue.SimpleQueue()
        self.is_closed = False

    def play(self, agent: Agent, row: dict, seed: int, address: str) -> None:
        """Body of the agent's thread."""
        try:
            self.inbox.put(agent(row, seed, address))
        except BaseException as error:
            self.inbox.put(error)

    def ask(self, call: Call) -> tuple[int, str]:
        """Wait for the answer to a call. In a thread of the server."""
        self.inbox.put(call)
        if self.is_closed:
            return 410, GONE
        return call.answers.get()

    def next(self) -> Call | float | None:
        """Return the agent's next call, or its reward at the end. Raises what the agent has raised."""
        said = self.inbox.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def added(self, call: Call) -> str:
        """Return what a call adds to the texts before it. Raises Refused."""
        for key, neutral in REFUSED.items():
            if asks_for(call.asked.get(key), neutral):
                raise Refused(f"{key} = {call.asked[key]!r:.60}: the calls of an agent that is trained have none")
        if call.kind == "completions":
            prompt = call.asked.get("prompt")
            if not isinstance(prompt, str) or not prompt.startswith(self.text):
                raise Refused(
                    f"prompt = {prompt!r:.60} does not go on from {self.text!r:.60}: the first call begins with the "
                    "row's prompt, each later one with the prompt and the answer of the call before it"
                )
            added, self.text = prompt.removeprefix(self.text), prompt
            return added
        messages = call.asked.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Refused(f"messages = {messages!r:.60} are no list of messages")
        new = messages[len(self.messages) :]
        if [*map(_said, messages[: len(self.messages)])] != [*map(_said, self.messages)]:
            raise Refused(
                "the messages do not go on from those before: the first call has the row's prompt, each later one the "
                "messages of the call before it, its answer and a message of the user"
            )
        if [message.get("role") for message in new] != ["user"] * (self.calls > 0):
            raise Refused(
                f"the call adds {len(new)} messages: the first adds none to the row's prompt, others one user's"
            )
        self.messages = messages
        return "".join(map(_text, new))

    def answer(self, call: Call, text: str) -> None:
        self.calls += 1
        self.text += text
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.newest, self.repeats = (call, text), 0
        call.answers.put((200, text))

    def answer_again(self, call: Call) -> bool:
        """Answer the newest call once more if this one is the same: clients that waited too long repeat theirs.

        A text goes on behind an empty answer with the same call, which is no repeat.
        """
        if not self.newest or (call.kind, call.asked) != (self.newest[0].kind, self.newest[0].asked):
            return False
        self.repeats += 1
        if self.repeats > MAX_REPEATS or (call.kind == KINDS[0] and not self.newest[1]):
            return False
        call.answers.put((200, self.newest[1]))
        return True

    def close(self) -> None:
        """Have all calls fail from now on, so that the agent ends."""
        self.is_closed = True
        while not self.inbox.empty():
            if isinstance(said := self.inbox.get(), Call):
                said.answers.put((410, GONE))


def from_agent(agent: Agent) -> Environment:
    """Return the environment of agent code: `agent(row, seed, address)` returns the reward, or None for 0.

    `address` is the base_url of an endpoint with /completions and /chat/completions. It exists for this episode only.
    What the agent does must be a function of row, seed and answers, as for every environment.
    """

    def environment(row: dict, seed: int) -> Turns:
        conversation, name = Conversation(row["prompt"]), secrets.token_urlsafe(16)
        server = _server()
        server.conversations[name] = conversation
        address = f"http://127.0.0.1:{server.server_address[1]}/{name}/v1"
        call: Call | float | None = None
        threading.Thread(target=conversation.play, args=(agent, row, seed, address), daemon=True).start()
        try:
            while isinstance(call := conversation.next(), Call):
                if conversation.answer_again(call):
                    continue
                try:
                    added = conversation.added(call)
                except Refused as error:
                    call.answers.put((400, str(error)))
                    continue
                action = yield added
                conversation.answer(call, action)
            return call
        finally:
            del server.conversations[name]
            if isinstance(call, Call):
                call.answers.put((410, GONE))
            conversation.close()

    return environment


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128
    server_bind = TCPServer.server_bind  # that of HTTPServer asks a name service for its own name
    conversations: dict[str, Conversation]

    def handle_error(self, request, client_address) -> None:
        """Say nothing of clients that have gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@cache
def _server() -> _Server:
    """Return this process's server for all of its episodes."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.conversations = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to say that it has the headers
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Requests leave no lines."""

    def do_POST(self) -> None:
        name, _, rest = self.path.removeprefix("/").partition("/v1/")
        kind, conversation = rest.rstrip("/"), self.server.conversations.get(name)
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self.close_connection = True  # where the next request begins is not known
            return self._reply(411, "the request needs its body's bytes as Content-Length")
        body = self.rfile.read(int(length))
        if not conversation or kind not in KINDS:
            return self._reply(410 if not conversation else 404, GONE if not conversation else f"no {rest!r:.60} here")
        try:
            asked = json.loads(body)
        except ValueError as error:
            return self._reply(400, f"the body is not JSON: {error}")
        if not isinstance(asked, dict):
            return self._reply(400, "the body is no object")
        status, text = conversation.ask(Call(kind, asked))
        if status != 200:
            return self._reply(status, text)
        answer: dict[str, object] = {"message": {"role": "assistant", "content": text}}
        if kind == KINDS[0]:
            answer = {"text": text}
        value = {
            "id": f"call-{conversation.calls}",
            "object": "text_completion" if kind == KINDS[0] else "chat.completion",
            "created": 0,
            "model": asked.get("model") or "policy",
        }
        self._send(200, value | {"choices": [{"index": 0, "finish_reason": "stop", "logprobs": None} | answer]})

    def _reply(self, status: int, message: str) -> None:
        self._send(
            status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        )

    def _send(self, status: int, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _text(message: dict) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _said(message: dict) -> tuple[object, str]:
    """Return role and text of a message as far as agents keep it: they may strip an answer."""
    return message.get("role"), _text(message).strip()
