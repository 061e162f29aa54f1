"""The HTTP endpoint: addresses, tokens of access, limits, streams of events. It knows no engine, only its loop."""

import hmac
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from socketserver import TCPServer
from typing import cast
from urllib.parse import unquote

from core import Tokenizer
from server.loop import EngineLoop, Ticket
from server.wire import Answers, ApiError, Ask, Chat, Json, Piece, read_ask, read_object

LOOK_SECONDS = 0.25  # between two looks whether a client is still there
IDLE_SECONDS = 60.0  # of a connection without bytes
DROP_BYTES, DROP_SECONDS = 2**26, 5.0  # that a body which is not wanted may have and take
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    request_seconds: float
    max_bytes: int  # of a request's body
    connections: int


class Endpoint(ThreadingHTTPServer):
    """Serves the requests of clients, a thread for each connection."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(
        self,
        address: tuple[str, int],
        loop: EngineLoop,
        tokenizer: Tokenizer,
        name: str,
        token: str,
        limits: Limits,
        weights: Callable[[], Json],
        swap: Callable[[str], None],
        chat: Chat,
    ):
        """`token`: that clients must send; empty: none. `weights` says which there are; `swap(folder)` takes others.

        Raises OSError when the address cannot be had.
        """
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.loop, self.tokenizer, self.name, self.token = loop, tokenizer, name, token
        self.limits, self.weights, self.swap, self.chat = limits, weights, swap, chat
        self.places = threading.Semaphore(limits.connections)

    def server_bind(self) -> None:
        """Take the address, and ask no name service for its name as `HTTPServer` does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self):
        try:
            return super().get_request()
        except OSError:  # as without a free descriptor: the connection stays, and would be asked for again at once
            time.sleep(0.1)
            raise

    def process_request(self, request, client_address) -> None:
        if not self.places.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could begin
            self.places.release()
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address) -> None:
        """Say nothing of clients that have gone; other errors get a traceback, as they are ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version, server_version, sys_version = "HTTP/1.1", "plainroll", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # else what follows the headers waits 40 ms for a client to say that it has them

    @property
    def endpoint(self) -> Endpoint:
        return cast(Endpoint, self.server)

    def log_message(self, format: str, *args: object) -> None:
        """Requests leave no lines: the console is for what the server's owner should know."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Tell errors of HTTP itself in the form of all others."""
        self.close_connection = True
        self._reply(code, ApiError(code, message or "not a request that this server knows").body)

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows an unread body would pass for the next request
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, work: Callable[[str], None]) -> None:
        self.has_body = False  # read
        try:
            path = unquote(self.path.partition("?")[0]).rstrip("/")
            if path != "/health":
                self._check_access()
            work(path)
        except ApiError as error:
            self.close_connection = True  # a body may not have been read
            self._reply(error.status, error.body)
        if self.close_connection and not self.has_body:
            self._drop_body()

    def _drop_body(self) -> None:
        """Read a body that is not wanted: many clients write all of it before they read their answer."""
        length, end = self.headers.get("Content-Length", ""), time.monotonic() + DROP_SECONDS
        is_number = length.isascii() and length.isdigit()
        left = min(int(length[:12]), DROP_BYTES) if is_number else DROP_BYTES * ("Transfer-Encoding" in self.headers)
        with suppress(OSError):
            while left > 0 and (seconds := end - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                if not (part := self.rfile.read1(min(left, 2**16))):
                    break
                left -= len(part)

    def _check_access(self) -> None:
        token, given = self.endpoint.token, self.headers.get("Authorization", "")
        if token:
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise ApiError(401, "wrong or no bearer token: send it as api_key", code="invalid_api_key")
            return
        # A page in a browser could reach this machine under a name of its own (DNS rebinding).
        host = self.headers.get("Host", "localhost")
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name not in (*LOCAL_NAMES, self.endpoint.server_name):
            raise ApiError(
                403, f"without a token only requests to {', '.join(LOCAL_NAMES)} are served, not to {name!r:.60}"
            )

    def _reply(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "1")
        if status == 504:  # OpenAI's clients would ask for the same work again, twice
            self.send_header("x-should-retry", "false")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    # ---- addresses -----------------------------------------------------------------------------------------------

    def _get(self, path: str) -> None:
        if path == "/health":
            return self._reply(200, {"status": "ok", "responses": self.endpoint.loop.under_way})
        if path == "/v1/models":
            return self._reply(200, {"object": "list", "data": [self._model()]})
        if path == f"/v1/models/{self.endpoint.name}":
            return self._reply(200, self._model())
        raise ApiError(404, f"nothing is at GET {path!r:.60}", code="not_found")

    def _model(self) -> Json:
        return {
            "id": self.endpoint.name,
            "object": "model",
            "owned_by": "plainroll",
            "created": 0,
        } | self.endpoint.weights()

    def _post(self, path: str) -> None:
        if path not in ("/v1/completions", "/v1/chat/completions", "/weights"):
            raise ApiError(404, f"nothing is at POST {path!r:.60}", code="not_found")
        body = self._body()
        if path == "/weights":
            return self._take_weights(body)
        endpoint, loop = self.endpoint, self.endpoint.loop
        config = loop.engine.config
        if (name := read_object(body).get("model")) not in (None, endpoint.name):
            raise ApiError(404, f"the model here is {endpoint.name!r}, not {name!r:.60}", code="model_not_found")
        defaults = loop.engine.sampling, config.stop, config.max_prompt_tokens, loop.most
        ask = read_ask(body, path == "/v1/chat/completions", endpoint.tokenizer, *defaults, endpoint.chat)
        number, ticket = loop.submit(ask)
        answers = Answers(ask, number, endpoint.name, endpoint.tokenizer)
        try:
            self._stream(ask, ticket, answers) if ask.stream else self._reply(
                200, answers.whole([*self._pieces(ticket)])
            )
        finally:
            loop.cancel(number)  # what is left of it, as when the client has gone

    def _take_weights(self, body: bytes) -> None:
        if not self.endpoint.token:
            raise ApiError(403, "only a server with a token takes weights from a request")
        folder = read_object(body).get("folder")
        if not isinstance(folder, str):
            raise ApiError(400, "folder must be a text: a checkpoint or a Hugging Face folder on the server's machine")
        self.endpoint.swap(folder)
        self._reply(200, self.endpoint.weights())

    def _body(self) -> bytes:
        length, most = self.headers.get("Content-Length", ""), self.endpoint.limits.max_bytes
        if self.headers.get_content_type() != "application/json":  # a page elsewhere cannot send this type unasked
            raise ApiError(415, "send JSON, with Content-Type: application/json")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise ApiError(411, "send the body in one piece, with its Content-Length")
        if len(length) > 12 or int(length) > most:
            raise ApiError(413, f"the body has {length:.20} bytes, over serve.max_mib = {most / 2**20:g}")
        self.has_body, body = True, self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise ApiError(400, "the body is cut short")
        return body

    # ---- what the loop gives -------------------------------------------------------------------------------------

    def _pieces(self, ticket: Ticket) -> Iterator[Piece]:
        """Yield the pieces of a request's responses to their end.

        Raises ApiError when that takes too long or the server ends, ConnectionError when the client has gone.
        """
        deadline = time.monotonic() + self.endpoint.limits.request_seconds
        left = len(ticket.ask.prompts) * ticket.ask.num_responses
        while left:
            if time.monotonic() > deadline:
                seconds = self.endpoint.limits.request_seconds
                raise ApiError(504, f"not done after serve.request_seconds = {seconds:g}", "timeout")
            try:
                piece = ticket.pieces.get(timeout=LOOK_SECONDS)
            except Empty:
                if self.endpoint.loop.is_stopping:
                    raise ApiError(503, "the server is ending", "server_error") from None
                self._check_client()
                continue
            left -= bool(piece.finish_reason)
            yield piece

    def _check_client(self) -> None:
        poll = select.poll()  # `select` knows no descriptor over 1023
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            self.close_connection = True
            raise ConnectionAbortedError("the client has gone")

    def _stream(self, ask: Ask, ticket: Ticket, answers: Answers) -> None:
        """Send events to the end, or to an error, which is an event too: the status has gone out before."""
        self.close_connection = True  # its end is that of the stream
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in self._pieces(ticket):
                self._event(answers.chunk(piece))
            if last := answers.last_chunk():
                self._event(last)
            self.wfile.write(b"data: [DONE]\n\n")
        except ApiError as error:
            self._event(error.body)

    def _event(self, value: Json) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
