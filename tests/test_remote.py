"""Services that grade or play: asked again when that may help, within the limit, and never believed blindly."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from test_env_pool import play

from environments import EnvConfig, Episode, Played
from envs.games import ENVIRONMENTS
from envs.pool import EnvPool
from process.workers import WorkerError
from reward import RewardConfig
from rewards import remote
from rewards.pool import RewardPool

pytestmark = pytest.mark.slow  # processes and whole runs

CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"


class Service(BaseHTTPRequestHandler):
    server: Any  # with what `service` gives it

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, request, time.monotonic()))
        self.server.act(self, request)

    def reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def service():
    """A server whose `act(handler, request)` the test sets; `address` and the requests `seen`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads, server.seen = True, []
    server.address = f"http://127.0.0.1:{server.server_port}/score?model=a"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)


def ask(service, seconds=5.0, retries=3) -> float:
    return remote.reward_in(remote.ask(service.address, b'{"response": "r"}', seconds, retries))


@pytest.mark.parametrize(
    "body, value", [("0.5", 0.5), ("1", 1.0), ('{"reward": -2.25}', -2.25), (' {"reward": 1e3, "why": "x"}', 1000.0)]
)
def test_a_number_or_an_object_with_one(service, body, value):
    service.act = lambda handler, _: handler.reply(200, body)
    assert ask(service) == value
    assert service.seen[0][:2] == ("/score?model=a", {"response": "r"})


@pytest.mark.parametrize(
    "body",
    ["", "nan", "Infinity", "null", '"1"', "[1]", "{}", '{"reward": "1"}', "1e999", "1e39", "<html>", "[" * 10**5],
)
def test_anything_else_is_an_error_that_quotes_it(service, body):
    service.act = lambda handler, _: handler.reply(200, body)
    with pytest.raises(remote.RemoteError, match="not a finite number"):
        ask(service)
    assert len(service.seen) == 1  # asking again would not help


@pytest.mark.parametrize("status, attempts", [(500, 4), (503, 4), (429, 4), (408, 4), (400, 1), (404, 1), (302, 1)])
def test_which_status_is_tried_again(service, status, attempts):
    def act(handler, _):
        handler.send_response(status)  # without a length: only that of a reward matters
        handler.end_headers()
        handler.wfile.write(b"1.0")

    service.act = act
    with pytest.raises(remote.RemoteError, match=f"status {status}"):
        ask(service)
    assert len(service.seen) == attempts
    times = [seen[2] for seen in service.seen]
    assert times == sorted(times) and (attempts == 1 or times[-1] - times[0] >= 0.07)  # 0.01 + 0.02 + 0.04


def test_a_second_attempt_may_succeed(service):
    def act(handler, _):
        match len(service.seen):
            case 1:
                handler.connection.close()
            case 2:
                handler.reply(502, "")
            case _:
                handler.reply(200, "0.75")

    service.act = act
    assert ask(service) == 0.75 and len(service.seen) == 3


CUT_OR_ENDLESS = {
    "cut off": b"Content-Length: 6\r\n\r\n12",
    "nothing of it": b"Content-Length: 6\r\n\r\n",
    "cut in a chunk": b"Transfer-Encoding: chunked\r\n\r\n6\r\n12",
    "cut between chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\n12\r\n",
    "cut in a chunk's size": b"Transfer-Encoding: chunked\r\n\r\n",
    "a negative chunk": b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + b"1" * 2**21,
    "a chunk of 8 EiB": b"Transfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n" + b"1" * 2**21,
    "a chunk beyond all numbers": b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 99 + b"\r\n" + b"1" * 2**21,
    "a chunk without size": b"Transfer-Encoding: chunked\r\n\r\nmuch\r\n1",
    "many chunks": b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n1\r\n" * 2**18,
    "8 EiB": b"Content-Length: 9223372036854775807\r\n\r\n" + b"1" * 2**21,
    "beyond all numbers": b"Content-Length: " + b"9" * 99 + b"\r\n\r\n" + b"1" * 2**21,
    "no length": b"\r\n" + b"1" * 2**21,
    "a long header": b"X: " + b"1" * 2**21,
    "many headers": b"X: 1\r\n" * 2**18,
    "no length, closed early": b"\r\n1",
    "a length that is none": b"Content-Length: abc\r\n\r\n1",
    "a negative length": b"Content-Length: -1\r\n\r\n1",
    "a length with a sign": b"Content-Length: +1\r\n\r\n1",
    "two lengths": b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12",
    "a length and chunks": b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n",
    "packed chunks": b"Transfer-Encoding: gzip, chunked\r\n\r\n1",
    "packed, then chunks": b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n1",
    "a header that is none": b"Content-Length: 1\r\nContent-Length 2\r\n\r\n12",
    "cut before the last line": b"Transfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n",
    "cut in a header": b"Content-Length: 1",
    "cut in the headers": b"Content-Length: 0\r\n",
    "cut in the status line": b"",
    "go on for ever": b"\r\n" + b"HTTP/1.1 100 Continue\r\n\r\n" * 2**17,
}


@pytest.mark.parametrize("name", CUT_OR_ENDLESS)
def test_a_reply_that_is_cut_short_or_too_long_is_a_failure_and_asked_for_again(name, service):
    status = {"go on for ever": b"100 Continue\r\n", "cut in the status line": b"404 Not"}.get(name, b"200 OK\r\n")
    read: list[int] = []

    def act(handler, _):
        if len(service.seen) > 1:
            return handler.reply(200, "0.75")
        with contextlib.suppress(OSError):  # the client has enough
            handler.connection.sendall(b"HTTP/1.1 " + status + CUT_OR_ENDLESS[name])

    def count(self, buffer):
        assert len(buffer) <= remote.MAX_REPLY + 1
        read.append(original(self, buffer))
        return read[-1]

    service.act, original = act, socket.SocketIO.readinto
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.SocketIO, "readinto", count)
        assert ask(service) == 0.75 and len(service.seen) == 2
    assert sum(read) < 1.1 * remote.MAX_REPLY


@pytest.mark.parametrize(
    "framing",
    ["Content-Length: 4\r\n\r\n0.75", "content-length:4 \n\n0.75", CHUNKED + "2\r\n0.\r\n2\r\n75\r\n0\r\n\r\n"],
)
def test_whole_replies_of_every_framing_are_read(framing, service):
    service.act = lambda handler, _: handler.connection.sendall(f"HTTP/1.1 200 OK\r\n{framing}".encode())
    assert ask(service) == 0.75 and len(service.seen) == 1


def test_no_service_is_an_error():
    with pytest.raises(remote.RemoteError, match="ConnectionRefusedError"):
        remote.ask("http://127.0.0.1:1/", b"{}", 5.0, 1)


@pytest.mark.parametrize("kind", ["silent", "drips", "half a number"])
@pytest.mark.parametrize("header", ["", "Content-Length: 20\r\n", "Content-Length: -1\r\n"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_limit_holds_whatever_the_service_does(service, kind, header, version):
    over = threading.Event()

    def act(handler, _):
        start = f"HTTP/{version} 200 OK\r\n{header}\r\n" + "1" * (kind == "half a number")
        handler.connection.sendall(start.encode())
        while not over.wait(0.05):
            if kind == "drips":
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    return

    service.act = act
    start = time.monotonic()
    with pytest.raises(remote.RemoteError, match="no reply within 0.2 s" if "20" in header else "failed: "):
        ask(service, seconds=0.2)
    assert time.monotonic() - start < 60  # the service would go on for ever
    over.set()


def test_the_pool_asks_several_at_a_time(service):
    together = threading.Barrier(4, timeout=60)

    def act(handler, request):
        together.wait()  # passes only when four requests are under way
        handler.reply(200, str(len(request["response"]) + request["row"]["bonus"]))

    service.act = act
    config = RewardConfig(remote_concurrency=4)
    with RewardPool(config, [service.address, "match"]) as pool:
        for i in range(8):
            pool.submit(i, service.address, "x" * i, "a", {"bonus": 0.5})
        pool.submit("m", "match", "a", "a", {})
        rewards = dict(pool.drain())
    assert rewards.pop("m").value == 1.0
    assert {i: reward.value for i, reward in rewards.items()} == {i: i + 0.5 for i in range(8)}


def test_what_is_forgotten_is_not_asked_any_more(service):
    gate = threading.Event()
    service.act = lambda handler, _: gate.wait(30) and handler.reply(200, "1")
    with RewardPool(RewardConfig(remote_concurrency=1), [service.address]) as pool:
        for key in "abcdef":
            pool.submit(key, service.address, key, "", {})
        deadline = time.monotonic() + 30
        while not service.seen and time.monotonic() < deadline:
            time.sleep(0.01)
        pool.forget(keep=["f"])
        gate.set()
        assert [key for key, _ in pool.drain()] == ["f"]
    assert [request["response"] for _, request, _ in service.seen] == ["a", "f"]


def test_a_service_that_is_down_costs_rewards_and_then_ends_the_run(service):
    service.act = lambda handler, _: handler.reply(404, "")
    config = RewardConfig(remote_concurrency=1, max_failures=3)
    with RewardPool(config, [service.address]) as pool:
        pool.submit(0, service.address, "", "", {})
        [(_, reward)] = pool.drain()
        assert reward.value == 0 and "status 404" in reward.error
        for i in range(2):
            pool.submit(i, service.address, "", "", {})
        with pytest.raises(WorkerError, match="failed 3 times in a row, the last time: .*status 404"):
            pool.drain()


# ---- environments ------------------------------------------------------------------------------------------------

GUESS, ROW = ENVIRONMENTS["guess"].environment, {"answer": "62"}
BISECT = ("50", "75", "62")
DEFAULTS = EnvConfig()


def told(episode: Episode) -> str:
    """Return what a service says of an episode after its newest turn: null where a turn has no reward."""
    reward = {"reward": episode.rewards[-1] or None if episode.rewards else None}
    return json.dumps({"end": True, **reward} if episode.end else {"text": episode.texts[-1], **reward})


def answer_turn(handler, request) -> None:
    """Remember nothing: play all turns of an episode again."""
    episode = Episode(GUESS, request["row"], request["seed"], EnvConfig.max_turns)
    for action in request["actions"]:
        episode.act(action)
    handler.reply(200, told(episode))


def play_by_service(service, episodes: int = 1, config: EnvConfig = DEFAULTS, **limits) -> list[tuple[Played, str]]:
    with EnvPool(config, RewardConfig(**limits), [service.address, "guess"]) as pool:
        for i in range(episodes):
            pool.begin(i, service.address, ROW, seed=i)
        return [*play(pool, lambda id, played: BISECT[len(played.actions)]).values()]


def test_a_service_plays_environments(service):
    service.act = answer_turn
    alone = Episode(GUESS, ROW, 0, EnvConfig.max_turns)
    for action in BISECT:
        alone.act(action)
    for played, error in play_by_service(service, episodes=8, remote_concurrency=3):
        assert not error and vars(played).items() <= vars(alone).items()
    by_id: dict[str, list] = {}
    for path, request, _ in service.seen:
        assert path == "/score?model=a" and request["row"] == ROW
        by_id.setdefault(request["id"], []).append((request["seed"], request["actions"]))
    turns = [[*BISECT[:i]] for i in range(4)]
    assert sorted(by_id.values()) == [[(seed, actions) for actions in turns] for seed in range(8)]


def test_a_service_is_asked_again_and_may_lose_what_it_knew(service):
    """This one keeps its episodes, until it starts again."""
    episodes: dict[str, Episode] = {}

    def act(handler, request):
        match len(service.seen):
            case 2:
                return handler.connection.close()
            case 4:
                episodes.clear()
        if not request["actions"]:
            episodes[request["id"]] = Episode(GUESS, request["row"], request["seed"], EnvConfig.max_turns)
        if not (episode := episodes.get(request["id"])):
            return handler.reply(404, "")
        if len(request["actions"]) > len(episode.actions):
            episode.act(request["actions"][-1])
        handler.reply(200, told(episode))

    service.act = act
    [(played, error)] = play_by_service(service)
    assert not error and played.rewards == [0.0, 0.0, 1.0] and len(service.seen) == 4 + 4
    assert service.seen[1][1] == service.seen[2][1]


@pytest.mark.parametrize(
    "body, said",
    [
        ("<html>", "the service replied b'<html>', not an object with a text"),
        ("[1]", "not an object with a text"),
        ("[" * 10**5, "not an object with a text"),
        ('{"end": 1}', "not an object with a text"),
        ('{"text": 5}', "yields 5, which is not text"),
        ('{"text": "\\ud800"}', "UnicodeEncodeError"),
        ('{"end": true}', "before its first turn"),
        ('{"text": "", "reward": NaN}', "the reward nan is not a finite number"),
        ('{"text": "", "reward": "1"}', "the reward '1' is not a finite number"),
        (json.dumps({"text": "x" * 2**20}), "a reply over 1048576 bytes"),
    ],
)
def test_a_service_that_plays_wrong_costs_the_episode_and_in_the_end_the_run(service, body, said):
    service.act = lambda handler, request: handler.reply(200, body)
    [(played, error)] = play_by_service(service, remote_retries=1)
    assert said in error and not played.end and not played.rewards
    with pytest.raises(WorkerError, match="environments failed in 2 episodes in a row"):
        play_by_service(service, episodes=2, config=EnvConfig(max_failures=2), remote_retries=0)


def test_a_service_that_hangs_is_waited_for_as_long_as_a_turn_may_take(service):
    over = threading.Event()
    service.act = lambda handler, request: over.wait(60)
    with pytest.raises(WorkerError, match=r"no reply within 0.1 s.* or raise env.step_seconds"):
        play_by_service(service, config=EnvConfig(step_seconds=0.1, max_failures=1))
    over.set()


def test_a_slow_episode_of_a_service_holds_up_no_other(service) -> None:
    """Nor does it hold up the end."""
    held, over = threading.Event(), threading.Event()

    def act(handler, request) -> None:
        if request["row"]["is_slow"]:
            held.wait(60)
            over.set()
        handler.reply(200, '{"text": "hi"}')

    service.act = act
    with EnvPool(EnvConfig(step_seconds=60), RewardConfig(remote_concurrency=2), [service.address]) as pool:
        for i in range(5):
            pool.begin(i, service.address, {"is_slow": i == 0}, 0)
        found = set[object]()
        while len(found) < 4:
            found |= {id for id, _, _ in pool.wait()}
        assert found == {1, 2, 3, 4}
    assert not over.is_set()
    held.set()
