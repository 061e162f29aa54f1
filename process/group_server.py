"""The server of a co-execution group: says which job's phase may use which workers. (RollMux, section 4)

The rule is `policies.group.Permits`. A pool of a job is one connection. When that closes, whatever the reason, it waits
for nothing any more, and its permit comes back when all processes of the job have ended: until then other ranks may be
on their devices. A message that is not one of docs/mux.md closes its connection, and nothing else happens.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from config import ConfigError
from policies.group import Part, Permits, Worker
from process.permits import MAX_LINE, PHASES, SILENCE, Message, address_of, proof_of

Place = Mapping[str, tuple[str, ...]]  # workers of each pool of a job, in the order of its ranks
LONGEST_ANSWER = 1000  # characters
SIGN_SECONDS = 1.0  # between two signs of life to a pool that waits
UNACKNOWLEDGED = getattr(socket, "TCP_USER_TIMEOUT", 18)


def place_of(train: Iterable[int], rollout: Iterable[int]) -> Place:
    """Return the place of a job on these training and rollout workers."""
    pools = {"train": tuple(f"train {i}" for i in train), "rollout": tuple(f"rollout {i}" for i in rollout)}
    return pools | {"all": pools["train"] + pools["rollout"]}


@dataclass(eq=False)
class Peer:
    """A pool of a job that is connected."""

    job: str
    pool: str
    place: Place
    writer: asyncio.StreamWriter
    phase: str = ""  # that it waits for, or is in
    part: int = 0  # ranks that can begin without the others; 0: all begin together
    number: int = 0  # of its requests
    begun: float = 0.0  # time at which it got the first workers of its phase
    told: Message | None = None  # the newest that it was told of its workers
    is_done: bool = False  # it has said that it asks for nothing any more

    @property
    def name(self) -> str:
        return f"{self.job}/{self.pool}"

    @property
    def workers(self) -> tuple[str, ...]:
        """Those of its phase; before all others, a job starts on all its workers at once."""
        return self.place["all" if self.phase == "start" else self.pool]

    def ranks(self, workers: Collection[Worker]) -> list[int]:
        return [rank for rank, worker in enumerate(self.workers) if worker in workers]


@dataclass
class GroupServer:
    """Grants permits, over connections that prove that they hold `secret`."""

    places: dict[str, Place]  # by job; jobs may come and go
    record: Callable[..., None]  # called with the name of an event, and its fields
    secret: str
    phase_seconds: float  # a phase that takes longer hangs
    end_job: Callable[[str, str], None]  # ends a job that hangs, and says why
    command: Callable[[Message], str]  # does what a user asks for; raises ConfigError when it cannot
    runs: Callable[[str], bool]  # whether a job has processes; when these have ended, `forget` is to be called
    permits: Permits = field(default_factory=Permits)
    peers: dict[str, Peer] = field(default_factory=dict)

    async def listen(self, server: str) -> None:
        """Answer at `host:port` or the path of a Unix socket from now on. Raises OSError when that cannot be."""
        address = address_of(server)
        if isinstance(address, tuple):
            try:
                await asyncio.start_server(self._serve, *address, limit=MAX_LINE)
            except (UnicodeError, OverflowError) as error:  # no name of a machine, no port
                raise OSError(str(error)) from None
        else:
            folder = Path(address).parent
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)  # nobody else can reach the socket, whatever the rights that it is made with
            await asyncio.start_unix_server(self._serve, address, limit=MAX_LINE)
            os.chmod(address, 0o600)

    def look_after(self) -> None:
        """Show life to those that wait, and end phases that hang. To be called every SIGN_SECONDS."""
        for peer in list(self.peers.values()):
            if peer.name in self.permits.granted:
                self._inform(peer)
                if time.monotonic() > peer.begun + self.phase_seconds:
                    why = f"its phase {peer.phase} took over mux.phase_seconds = {self.phase_seconds:g}"
                    self.end_job(peer.job, why)
                    peer.writer.transport.abort()
            elif peer.name in self.permits.parts and not peer.writer.transport.get_write_buffer_size():
                _send(peer.writer, {"waits": peer.phase})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = None
        try:
            peer = await self._welcome(reader, writer)
            while peer and (line := await reader.readline()) and self.peers.get(peer.name) is peer:
                self._follow(peer, line)
        except (ValueError, RecursionError, TimeoutError) as error:
            why = str(error)[:LONGEST_ANSWER] or f"it said nothing for {SILENCE:g} s"
            self.record("refused", job=peer.job if peer else "", why=why)
            _send(writer, {"error": why})
        except OSError:
            pass  # it has gone
        except asyncio.CancelledError:  # this server ends, but they work on until they see that: no permit moves
            return
        finally:
            writer.close()
        if peer and self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
            held = self.permits.granted.get(peer.name, set()) if self.runs(peer.job) else set()
            self._take_back(peer.job, peer.pool, held, peer.is_done)

    def forget(self, job: str) -> None:
        """Take back the permits of a job whose processes have ended. Connections of its next start are others."""
        for pool in self.places[job]:
            peer = self.peers.pop(f"{job}/{pool}", None)
            if peer:  # its end has not been read yet
                peer.writer.transport.abort()
            if peer or f"{job}/{pool}" in self.permits.granted:
                self._take_back(job, pool, set(), done=True)

    def _take_back(self, job: str, pool: str, held: set[Worker], done: bool) -> None:
        """Withdraw what a pool waits for, and take back what it has but for workers that are `held` still."""
        name = f"{job}/{pool}"
        granted = self.permits.release(name, {w for part in self.permits.parts.get(name, ()) for w in part} - held)
        self.record("left", job=job, pool=pool, workers=sorted(held), **{"done": True} if done else {})
        self._grant(granted)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer | None:
        """Return who has connected, or None if it only had a command. Raises ValueError on strangers."""
        if writer.get_extra_info("socket").family != socket.AF_UNIX:  # a machine that has gone says no goodbye
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, UNACKNOWLEDGED, int(SILENCE * 1000))
        challenge = secrets.token_hex(16)
        _send(writer, {"challenge": challenge})
        hello = json.loads(await asyncio.wait_for(reader.readline(), SILENCE))
        proof = hello.pop("proof", "") if isinstance(hello, dict) else ""
        if not hmac.compare_digest(str(proof).encode(), proof_of(self.secret, challenge).encode()):
            raise ValueError("a stranger: it does not hold the group's secret")
        match hello:
            case {"command": str()}:
                try:
                    _send(writer, {"answer": self.command(hello)})
                except (ConfigError, OSError) as error:  # of a user: no stranger
                    _send(writer, {"refused": str(error)[:LONGEST_ANSWER]})
                except (ArithmeticError, LookupError, TypeError) as error:  # ours: the group goes on
                    _send(writer, {"refused": f"{type(error).__name__}: {error}"[:LONGEST_ANSWER]})
                return None
            case {"job": str(job), "pool": str(pool), **rest} if not rest:
                if pool not in self.places.get(job, ()):
                    raise ValueError(f"the group has no job {job!r} with a pool {pool!r}")
                peer = Peer(job, pool, self.places[job], writer)
                if peer.name in self.peers:
                    raise ValueError(f"the pool {pool} of job {job} is connected already")
                self.peers[peer.name] = peer
                self.record("joined", job=job, pool=pool)
                _send(writer, {"welcome": job})
                return peer
        raise ValueError("not a message of a group")

    def _follow(self, peer: Peer, line: bytes) -> None:
        """Do as a pool says. Raises ValueError on other messages, and on a request in a phase."""
        match json.loads(line):
            case {"request": str(phase), "part": part, **rest} if phase in PHASES and not rest and type(part) is int:
                self._ask(peer, phase, part)
            case {"leaves": None, **rest} if not rest:
                peer.is_done = True
            case {"release": None, **rest} if not rest:
                self._give_back(peer, peer.workers)
            case {"release": [*numbers], **rest} if not rest and all(
                type(number) is int and number in range(len(peer.workers)) for number in numbers
            ):
                self._give_back(peer, [peer.workers[number] for number in numbers])
            case _:
                raise ValueError("not a message of a group")

    def _ask(self, peer: Peer, phase: str, part: int) -> None:
        """Queue for a phase. Raises ValueError in a phase, and on a part that is none."""
        peer.phase = phase
        workers = peer.workers
        size = part or len(workers)
        if part and (phase != "rollout" or part < 0 or len(workers) % part):
            raise ValueError(f"a {phase} on {len(workers)} workers has no parts of {part}")
        granted = self.permits.request(peer.name, [workers[i : i + size] for i in range(0, len(workers), size)])
        peer.part, peer.number, peer.begun = part, peer.number + 1, 0.0
        self._tell("asks", peer)
        self._grant(granted)

    def _give_back(self, peer: Peer, workers: Sequence[str]) -> None:
        granted = self.permits.release(peer.name, workers)
        self._tell("shrinks" if peer.name in self.permits.parts else "ends", peer, workers=self._held(peer))
        self._grant(granted)

    def _held(self, peer: Peer) -> list[str]:
        return [worker for worker in peer.workers if worker in self.permits.granted.get(peer.name, ())]

    def _grant(self, granted: Iterable[tuple[str, Part]]) -> None:
        """Note who has got workers, and tell all whom a change of the queues is news."""
        for peer in [self.peers[name] for name in dict.fromkeys(name for name, _ in granted)]:
            self._tell("grows" if peer.begun else "begins", peer, workers=self._held(peer))
            peer.begun = peer.begun or time.monotonic()
        for peer in self.peers.values():
            if peer.name in self.permits.granted:
                self._inform(peer)

    def _inform(self, peer: Peer) -> None:
        """Tell a pool which workers it has, and one that has parts for which of them others wait, if that is new."""
        awaited = [peer.ranks(part) for part in self.permits.awaited(peer.name)] if peer.part else []
        news: Message = {"granted": peer.ranks(self._held(peer)), "awaited": awaited, "number": peer.number}
        if news != peer.told and not peer.writer.transport.get_write_buffer_size():  # else it reads nothing
            _send(peer.writer, news)
            peer.told = news

    def _tell(self, event: str, peer: Peer, **fields: object) -> None:
        self.record(event, job=peer.job, pool=peer.pool, phase=peer.phase, **fields)


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
