"""A server of a group of jobs in a thread of the test's own process, and waits for what it does."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable

from process.group_server import GroupServer, place_of
from process.permits import Client

PLACES = {"a": place_of([0], [0, 1]), "b": place_of([0], [0, 1]), "c": place_of([0], [1])}
LONGEST = 120.0  # seconds


class Group:
    """A server in a thread of its own, and what it has recorded."""

    def __init__(self, server: str, secret: str = "", phase_seconds: float = 1e9):
        self.server, self.secret = server, secret
        self.events: list[tuple[str, dict]] = []
        self.ended: list[tuple[str, str]] = []
        self.running = set[str]()  # jobs of which processes are said to be there
        self.known, runs = set[str](), self.running.__contains__
        self.core = GroupServer(dict(PLACES), self.record, secret, phase_seconds, self.end_job, str, runs)
        self.listens, self.stopping = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self.listens.wait(LONGEST)

    async def _run(self) -> None:
        await self.core.listen(self.server)
        self.listens.set()
        while not self.stopping.is_set():
            await asyncio.sleep(0.02)
            self.core.look_after()
            for job in {*self.known} - self.running:
                self.core.forget(job)
            self.known = {*self.running}

    def record(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    def end_job(self, job: str, why: str) -> None:
        self.ended.append((job, why))

    def connect(self, job: str, pool: str = "rollout", wait_seconds: float = LONGEST, secret: str | None = None):
        given = self.secret if secret is None else secret
        return Client(self.server, job, pool, given, wait_seconds, lambda: None)

    def raw(self) -> tuple[socket.socket, dict]:
        """Return a connection and the challenge that it got."""
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(LONGEST)
        peer.connect(self.server)
        return peer, json.loads(peer.makefile().readline())

    def came(self, event: str) -> list[dict]:
        return [fields for name, fields in self.events if name == event]

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(LONGEST)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
