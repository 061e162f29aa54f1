"""Ask a service over HTTP, one POST of JSON at a time: bounded in time and in bytes, and tried again.

Reward services get {"response", "answer", "row"}, and reply with a number or {"reward": number}; for environments see
envs/service.py.
"""

import contextlib
import http.client
import io
import json
import re
import socket
import threading
import time
import urllib.parse

from config import ConfigError
from reward import LARGEST_REWARD, RewardConfig, reward_number

FIRST_PAUSE = 0.25  # seconds before the second attempt; each further pause is twice as long
MAX_REPLY = 2**20  # bytes, with status line, headers and chunk sizes
NEVER = threading.Event()


class RemoteError(RuntimeError):
    """The service gave no valid reply; the text says why."""


class LateError(RemoteError):
    """There was no reply in time."""


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_address(kind: str, name: str) -> None:
    """Raise ConfigError if `name` is no valid address of a `kind` such as "grader"."""
    try:
        address = urllib.parse.urlsplit(name)
        is_sound = bool(address.hostname and address.hostname.encode("idna")) and address.port != 0
        is_sound &= "@" not in address.netloc  # a name and password would not be sent
        is_sound &= bool(re.fullmatch(r"[\w.-]*|[0-9a-f.]*:[0-9a-f:.]*(%[\w.-]+)?", address.hostname or ""))
        is_sound &= bool(re.fullmatch("[!-~]*", address.path + address.query))
    except ValueError:
        is_sound = False
    if not is_sound or re.search(r"\s", name):
        raise ConfigError(
            f"{kind} {name!r} is not a valid address; write http://host:port/path, and escape other characters of "
            "the path, such as %20 and %C3%A9"
        )


class _Bounded(io.BufferedReader):
    """Reads at most MAX_REPLY bytes: a service may announce any length, and `http.client` refuses none.

    Raises HTTPException for more bytes, for a line that is cut off, and for a negative length, which Python would take
    for "read to the end".
    """

    left = MAX_REPLY

    def read(self, size: int | None = None) -> bytes:
        if size is not None and size < 0:
            raise http.client.HTTPException(f"a chunk of {size} bytes")
        return self._count(super().read(self.left + 1 if size is None else min(size, self.left + 1)))

    def readline(self, size: int | None = -1) -> bytes:
        line = self._count(super().readline(size))
        if not line.endswith(b"\n") and len(line) != size:
            raise http.client.HTTPException("a reply cut off in its status line, headers or chunk sizes")
        return line

    def _count(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise http.client.HTTPException(f"a reply over {MAX_REPLY} bytes")
        return data


class _Reply(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args, **kwargs):
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = _Bounded(sock.makefile("rb", 0))

    def begin(self) -> None:
        """Read status and headers. Raises HTTPException if they do not say where a reply ends: it may be cut short."""
        super().begin()
        lengths, encodings = (self.headers.get_all(name, []) for name in ("Content-Length", "Transfer-Encoding"))
        is_counted = len(lengths) == 1 and bool(re.fullmatch("[0-9]+", lengths[0].strip(" \t"))) and not encodings
        is_chunked = self.chunked and len(encodings) == 1 and not lengths
        if self.status == 200 and (self.headers.defects or not (is_counted or is_chunked)):
            raise http.client.HTTPException("a reply with neither one Content-Length nor Transfer-Encoding: chunked")


def ask(
    address: str,
    body: bytes,
    seconds: float = RewardConfig.remote_seconds,
    retries: int = RewardConfig.remote_retries,
    closing: threading.Event = NEVER,
) -> bytes:
    """Return the service's reply. Raises RemoteError if there is none within `seconds` and `retries`.

    A request is sent again after an error that may pass: no connection, a connection cut off, a reply cut short or
    without its length, status 408, 429 and 5xx.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    for attempt in range(retries + 1):
        left = deadline - time.monotonic()
        try:
            status, reply = _post(address, body, left)
            if status == 200:
                return reply
            cause = f"status {status}"
            if status not in (408, 429) and status < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            cause = f"{type(error).__name__} {error}"
        left = deadline - time.monotonic()
        if left <= pause:
            raise LateError(f"the service at {address} failed: {cause}, no reply within {seconds:g} s")
        if attempt < retries and closing.wait(pause):
            break
        pause *= 2
    raise RemoteError(f"the service at {address} failed: {cause}")


def _post(address: str, body: bytes, seconds: float) -> tuple[int, bytes]:
    """Send one request; return status and reply, or raise OSError or HTTPException, all within `seconds`."""
    deadline, parts = time.monotonic() + seconds, urllib.parse.urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname, "check_address has refused addresses without a host"
    connection = kind(parts.hostname, parts.port, timeout=max(seconds, 0.001))
    connection.response_class = _Reply
    connection.connect()
    sock = connection.sock  # the connection forgets it when the reply is the last
    is_cut = threading.Event()

    def cut() -> None:
        is_cut.set()  # before the reader sees the end, which it could take for the service's
        with contextlib.suppress(OSError):  # the exchange is over already
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own shutdown would let the reader go on without TLS

    # The connection's own time-out is for each read: a service that sends a byte now and then never reaches it.
    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read()  # all of it: less than was announced raises IncompleteRead
        if is_cut.is_set():
            raise TimeoutError
        return response.status, reply
    finally:
        timer.cancel()
        connection.close()


def reward_in(reply: bytes) -> float:
    """Return the number in a reply. Raises RemoteError if there is none that can be trained on."""
    try:
        value = json.loads(reply)
        value = value["reward"] if isinstance(value, dict) else value
        if (number := reward_number(value)) is not None:
            return number
    except (ValueError, KeyError, RecursionError):
        pass
    raise RemoteError(
        f"the service replied {reply[:80]!r}, not a finite number of at most {LARGEST_REWARD:g} or {{'reward': number}}"
    )
