"""A pool's side of a co-execution group: it asks the group's server for permits, and gives them back. (RollMux)

A message is a line of JSON of at most `MAX_LINE` bytes; docs/mux.md lists them. Nothing that is read is run as code.
"""

import hmac
import json
import socket
import time
from collections.abc import Callable, Sequence

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
    return (host, int(port)) if host and port.isdecimal() and "/" not in server else server


class Connection:
    """A connection to the server of a group. Every error is a GroupError."""

    def __init__(self, server: str, hello: Message, secret: str):
        """`hello` says who asks. The secret is for `host:port`: the folder of a Unix socket keeps others out."""
        self.server, address = server, address_of(server)
        try:
            if isinstance(address, tuple):
                self._socket = socket.create_connection(address, SILENCE)
            else:
                secret, self._socket = "", socket.socket(socket.AF_UNIX)
                self._socket.connect(address)
        except OSError as error:  # a name that cannot be resolved, a path that is too long, too
            raise self._error(f"cannot reach it ({error.strerror or error}); start the group with mux.py") from None
        self._lines = self._socket.makefile("rb")
        challenge = str(self.receive().get("challenge"))
        self.send(hello | {"proof": proof_of(secret, challenge)})
        self.answer = self.receive()

    def _error(self, text: str) -> GroupError:
        return GroupError(f"group.server = {self.server!r}: {text}")

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def receive(self) -> Message:
        """Return the server's next message. Raises GroupError if it refuses, has gone, or shows no life."""
        self._socket.settimeout(SILENCE)
        try:
            line = self._lines.readline(MAX_LINE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError:
            raise self._error(f"it has shown no sign of life for {SILENCE:g} s") from None
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
        self._lines.close()
        self._socket.close()


class Client(Connection):
    """Asks for the permits of one pool of a job, on the pool's first rank."""

    def __init__(self, server: str, job: str, pool: str, secret: str, wait_seconds: float, on_wait: Callable[[], None]):
        """`pool`: train, rollout, or all for ranks that do both. `on_wait` is called every second of a wait."""
        super().__init__(server, {"job": job, "pool": pool}, secret)
        self.wait_seconds, self.on_wait = wait_seconds, on_wait

    def request(self, phase: str) -> None:
        """Wait for the permit of a phase, one of PHASES: for the pool's workers, at the start for all of the job's."""
        self.send({"request": phase})
        deadline = time.monotonic() + self.wait_seconds
        while "granted" not in self.receive():
            if time.monotonic() > deadline:
                raise self._error(f"no permit for {phase} within group.wait_seconds = {self.wait_seconds:g}")
            self.on_wait()

    def release(self, workers: Sequence[int] | None = None) -> None:
        """Give the permit back, or that for some of the pool's ranks, by their numbers in the pool."""
        self.send({"release": None if workers is None else [*workers]})
