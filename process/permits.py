"""A pool's side of a co-execution group: it asks the group's server for permits, and gives them back. (RollMux)

A message is a line of JSON of at most `MAX_LINE` bytes; docs/mux.md lists them. Nothing that is read is run as code.
"""

import hmac
import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

SECRET = "PLAINROLL_GROUP_SECRET"  # in the environment: others can read config files and command lines
PHASES = ("start", "rollout", "train")
MAX_LINE = 2**16
SILENCE = 30.0  # seconds without a sign of life: the server hangs
Message = dict[str, object]


class GroupError(RuntimeError):
    """The group's server has gone, refuses, or gives no permit in time: the run cannot go on."""


def proof_of(secret: str, challenge: str) -> str:
    """Return what only a holder of the secret can answer to a challenge."""
    return hmac.new(secret.encode(), challenge.encode(), "sha256").hexdigest()


def address_of(server: str) -> str | tuple[str, int]:
    """Return the host and port of `host:port`, else the path of a Unix socket."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    return (host, int(port)) if host and port.isdecimal() and "/" not in server else server


class Connection:
    """A connection to the server of a group. Every error is a GroupError."""

    NAME = "the group at {!r}"  # in errors: mux.py finds it by mux.dir or mux.server

    def __init__(self, server: str, hello: Message, secret: str):
        """`hello` says who asks. The secret is for `host:port`: the folder of a Unix socket keeps others out."""
        self.server, address = server, address_of(server)
        try:
            if isinstance(address, tuple):
                self._socket = socket.create_connection(address, SILENCE)
            else:
                secret, self._socket = "", socket.socket(socket.AF_UNIX)
                self._socket.connect(address)
        except (OSError, UnicodeError, OverflowError) as error:  # a name that is none, a path that is too long, too
            why = getattr(error, "strerror", None) or error
            raise self._error(f"cannot reach it ({why}); start the group with mux.py") from None
        self._arrived = b""  # and not read yet
        challenge = str(self.receive().get("challenge"))
        self.send(hello | {"proof": proof_of(secret, challenge)})
        self.answer = self.receive()

    def _error(self, text: str) -> GroupError:
        return GroupError(f"{self.NAME.format(self.server)}: {text}")

    def send(self, message: Message) -> None:
        try:
            self._socket.settimeout(SILENCE)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def receive(self) -> Message:
        """Wait for the server's next message. Raises GroupError if it refuses, has gone, or shows no life."""
        if (message := self.next_within(SILENCE)) is None:
            raise self._error(f"it has shown no sign of life for {SILENCE:g} s")
        return message

    def next_within(self, seconds: float) -> Message | None:
        """Return the server's next message, or None if it does not come. Raises GroupError if it refuses, has gone."""
        try:
            self._socket.settimeout(seconds)
            while b"\n" not in self._arrived:
                data = self._socket.recv(MAX_LINE)
                if not data or len(self._arrived) > MAX_LINE:
                    raise self._gone()
                self._arrived += data
            line, _, self._arrived = self._arrived.partition(b"\n")
            message = json.loads(line)
        except (TimeoutError, BlockingIOError):
            return None
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):
            raise self._gone()
        if "error" in message:
            raise self._error(str(message["error"]))
        return message

    def _gone(self) -> GroupError:
        return self._error("it has gone; start the group again with mux.py --resume")

    def close(self) -> None:
        self._socket.close()


class Client(Connection):
    """Asks for the permits of one pool of a job, on the pool's first rank."""

    NAME = "group.server = {!r}"

    def __init__(self, server: str, job: str, pool: str, secret: str, wait_seconds: float, on_wait: Callable[[], None]):
        """`pool`: train, rollout, or all for ranks that do both. `on_wait` is called every second of a wait."""
        super().__init__(server, {"job": job, "pool": pool}, secret)
        self.wait_seconds, self.on_wait = wait_seconds, on_wait
        self.number = 0  # of the newest request
        self.ranks: list[int] = []  # of the pool, whose permits are there; at the start, of the job
        self.awaited: list[list[int]] = []  # each of these would let another job begin, or go on with more

    def request(self, phase: str, part: int = 0) -> None:
        """Wait for the permit of a phase, one of PHASES: for the pool's workers, at the start for all of the job's.

        `part`: ranks of the pool that can begin without the others, next to each other. Then this waits for the first
        part, and `look` tells of more. 0: all begin together.
        """
        self.number, self.ranks, self.awaited = self.number + 1, [], []
        self.send({"request": phase, "part": part})
        deadline = time.monotonic() + self.wait_seconds
        while True:
            self._take(self.receive())
            if self.ranks:
                return
            if time.monotonic() > deadline:
                raise self._error(f"no permit for {phase} within group.wait_seconds = {self.wait_seconds:g}")
            self.on_wait()

    def look(self) -> None:
        """Have `ranks` and `awaited` as the server says by now. Does not wait."""
        with suppress(GroupError):  # as in `release`
            while message := self.next_within(0.0):
                self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case {"granted": [*ranks], "awaited": [*awaited], "number": self.number}:  # not of an earlier request
                self.ranks, self.awaited = cast(list[int], ranks), cast(list[list[int]], awaited)

    def leave(self) -> None:
        """Say that the pool asks for nothing any more, and close: its job may take a while to end."""
        with suppress(GroupError):
            self.send({"leaves": None})
        self.close()

    def release(self, ranks: Sequence[int] | None = None) -> None:
        """Give the permit back, or that for some of the pool's ranks. What has not been granted is withdrawn."""
        with suppress(GroupError):  # the next request says that the server has gone: others may need this phase's work
            self.send({"release": None if ranks is None else [*ranks]})
