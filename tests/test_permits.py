"""Permits of a co-execution group, asked for and given over sockets (process/permits.py, process/group_server.py)."""

import json
import os
import socket
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from groups import LONGEST, PLACES, Group, in_thread, until

from process import permits
from process.permits import Client, GroupError, proof_of


def test_phases_begin_in_the_order_of_requests(group: Group) -> None:
    clients = {name: group.connect(name) for name in "abc"}
    waiting = []
    for name in "abc":
        waiting.append(in_thread(partial(clients[name].request, "rollout")))
        until(lambda: len(group.came("asks")) == len(waiting))
    assert [event["job"] for event in group.came("begins")] == ["a"]
    for name, thread in zip("abc", waiting, strict=True):
        thread.join(LONGEST)
        clients[name].release()
    until(lambda: len(group.came("ends")) == 3)
    assert [event["job"] for event in group.came("begins")] == ["a", "b", "c"]


def test_pools_of_a_group_work_side_by_side_but_a_start_takes_all_workers(group: Group) -> None:
    a, b = group.connect("a"), group.connect("b", "train")
    a.request("rollout")
    b.request("train")
    b.release()
    waits = in_thread(lambda: b.request("start"))
    until(lambda: len(group.came("asks")) == 3)
    assert len(group.came("begins")) == 2
    a.release()
    waits.join(LONGEST)
    workers = [*PLACES["b"]["all"]]
    assert group.came("begins")[-1] == {"job": "b", "pool": "train", "phase": "start", "workers": workers}


def test_a_rollout_in_parts_begins_on_the_first_and_hears_of_more(group: Group) -> None:
    a, b, c = (group.connect(name) for name in "abc")
    c.request("rollout")  # on worker 1
    a.request("rollout", part=1)
    assert (a.ranks, a.awaited) == ([0], [])
    waits = in_thread(lambda: b.request("rollout", part=1))
    until(lambda: (a.look(), a.awaited)[1])
    assert a.awaited == [[0]]
    c.release()
    until(lambda: (a.look(), a.ranks)[1] == [0, 1])
    assert sorted(a.awaited) == [[0], [1]]
    a.release([0])
    waits.join(LONGEST)
    assert b.ranks == [0]
    a.release()
    until(lambda: (b.look(), b.ranks)[1] == [0, 1])
    b.release()
    until(lambda: len(group.came("ends")) == 3)
    assert [(e["job"], e["workers"]) for e in group.came("grows")] == [("a", ["rollout 0", "rollout 1"])] + [
        ("b", ["rollout 0", "rollout 1"])
    ]
    assert group.came("shrinks") == [{"job": "a", "pool": "rollout", "phase": "rollout", "workers": ["rollout 1"]}]


def test_what_is_given_back_before_it_is_granted_is_withdrawn(group: Group) -> None:
    a, b, c = (group.connect(name) for name in "abc")
    c.request("rollout")
    a.request("rollout", part=1)
    a.release([1])
    c.release()
    b.send({"request": "rollout", "part": 1})
    until(lambda: [e["workers"] for e in group.came("begins")][-1] == ["rollout 1"])
    a.release()
    until(lambda: group.came("grows"))
    assert [e["job"] for e in group.came("begins")] == ["c", "a", "b"] and group.came("grows")[0]["job"] == "b"


def test_news_of_an_earlier_request_are_not_read_as_those_of_the_next(group: Group) -> None:
    a, b = group.connect("a"), group.connect("b")
    a.request("rollout", part=1)
    b.send({"request": "rollout", "part": 1})
    until(lambda: len(group.came("asks")) == 2)
    a.release()  # it has not read yet that b waits
    waits = in_thread(lambda: a.request("rollout", part=2))
    until(lambda: len(group.came("asks")) == 3)
    assert a.ranks == a.awaited == []
    b.release([1])
    b.send({"release": None})
    waits.join(LONGEST)
    assert (a.ranks, a.awaited) == ([0, 1], [])


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_job_that_dies_with_a_part_of_its_workers_holds_up_nobody(group: Group, shrinks: bool) -> None:
    """It has had all and shrunk, or it waits for the rest."""
    a, b, c = (group.connect(name) for name in "abc")
    if not shrinks:
        c.request("rollout")
    a.request("rollout", part=1)
    if shrinks:
        a.release([1])
    b.send({"request": "rollout", "part": 1})
    until(lambda: len(group.came("asks")) == 3 - shrinks)
    a.close()
    until(lambda: group.came("left"))
    c.close()
    b.number = 1
    until(lambda: (b.look(), b.ranks)[1] == [0, 1])


def test_some_workers_are_given_back_early(group: Group) -> None:
    a, c = group.connect("a"), group.connect("c")
    a.request("rollout")
    waits = in_thread(lambda: c.request("rollout"))
    until(lambda: len(group.came("asks")) == 2)
    a.release([1])
    waits.join(LONGEST)
    assert group.came("shrinks") == [{"job": "a", "pool": "rollout", "phase": "rollout", "workers": ["rollout 0"]}]
    a.release()
    until(lambda: bool(group.came("ends")))


def test_a_closed_connection_gives_back_its_permit_and_withdraws_its_request(group: Group) -> None:
    a, b, c = (group.connect(name) for name in "abc")
    a.request("rollout")
    b.send({"request": "rollout", "part": 0})
    until(lambda: len(group.came("asks")) == 2)
    b.close()
    until(lambda: len(group.came("left")) == 1)
    waits = in_thread(lambda: c.request("rollout"))
    until(lambda: len(group.came("asks")) == 3)
    a.close()
    waits.join(LONGEST)
    assert [event["job"] for event in group.came("begins")] == ["a", "c"]
    c.close()
    group.connect("a").request("rollout")  # the job has been resumed


def test_a_permit_comes_back_when_all_processes_of_its_job_have_ended(group: Group) -> None:
    """The rank that had asked for it may be gone long before the others leave their devices."""
    group.running.add("a")
    until(lambda: "a" in group.known)
    a, b, c = (group.connect(name) for name in "abc")
    c.request("rollout")
    a.send({"request": "rollout", "part": 1})
    b.send({"request": "rollout", "part": 0})
    until(lambda: len(group.came("asks")) == 3)
    a.close()
    until(lambda: len(group.came("left")) == 1)
    c.release()
    until(lambda: len(group.came("ends")) == 1)
    assert [event["job"] for event in group.came("begins")] == ["c", "a"], "its other request is withdrawn"
    group.running.clear()
    until(lambda: [event["job"] for event in group.came("begins")] == ["c", "a", "b"])
    assert [event["workers"] for event in group.came("left")] == [["rollout 0"], []]


def test_a_connection_that_outlives_its_job_is_not_taken_for_one_of_its_next_start(group: Group) -> None:
    """Processes have been seen to end before the end of their connection was read."""
    group.running.add("a")
    until(lambda: "a" in group.known)
    before, other = group.connect("a"), group.connect("b")
    before.request("rollout")
    waits = in_thread(lambda: other.request("rollout"))
    until(lambda: len(group.came("asks")) == 2)
    group.running.clear()
    waits.join(LONGEST)
    left = {"job": "a", "pool": "rollout", "workers": [], "done": True}
    assert group.came("left") == [left]
    group.running.add("a")
    until(lambda: "a" in group.known)
    after = group.connect("a")
    other.release()
    after.request("rollout")
    before.release()
    before.close()
    after.release()
    after.leave()
    until(lambda: len(group.came("left")) == 2)
    assert group.came("left") == [left, left]
    assert [(event["job"], event["workers"]) for event in group.came("ends")] == [("b", []), ("a", [])]


def test_a_pool_that_leaves_says_that_it_is_done(group: Group) -> None:
    group.connect("a").leave()
    until(lambda: group.came("left") == [{"job": "a", "pool": "rollout", "workers": [], "done": True}])


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\n",
        b"\xff\n",
        b"[" * 50_000 + b"\n",
        b"9" * 70_000 + b"\n",
        b"1\n",
        b"{}\n",
        b'{"request": "rollout"}\n',
        b'{"leaves": "us"}\n',
        b'{"request": "lunch", "part": 0}\n',
        b'{"request": ["rollout"], "part": 0}\n',
        b'{"request": "rollout", "part": 0, "as": "root"}\n',
        b'{"request": "rollout", "part": true}\n',
        b'{"request": "rollout", "part": 1.0}\n',
        b'{"request": "rollout", "part": -1}\n',
        b'{"request": "rollout", "part": 3}\n',
        b'{"request": "start", "part": 1}\n',
        b'{"release": [2]}\n',
        b'{"release": [[0]]}\n',
        b'{"release": [0.0]}\n',
        b'{"release": [-1]}\n',
        b'{"request": "rollout", "part": 0}\n{"request": "rollout", "part": 0}\n',
    ],
)
def test_a_wrong_message_closes_its_connection_and_nothing_else(group: Group, line: bytes) -> None:
    a, b = group.connect("a"), group.connect("b")
    a.request("train")
    b._socket.sendall(line)
    until(lambda: len(group.came("left")) == 1)
    assert len(group.came("refused")) == 1 and group.came("left") == [{"job": "b", "pool": "rollout", "workers": []}]
    a.release()
    group.connect("b").request("rollout")


def test_a_wrong_greeting_is_refused(group: Group) -> None:
    for hello in (b"\n", b"[]\n", b"\xff\n", b"x" * 70_000 + b"\n", b'{"job": "a"}\n'):
        peer, _ = group.raw()
        with peer:
            peer.sendall(hello)
            assert "error" in json.loads(peer.makefile().readline())
    assert len(group.came("refused")) == 5 and not group.came("joined")


def test_a_job_that_is_not_of_the_group_and_a_pool_that_is_there_are_refused(group: Group) -> None:
    with pytest.raises(GroupError, match="the group has no job 'd' with a pool 'rollout'"):
        group.connect("d")
    first = group.connect("a")
    with pytest.raises(GroupError, match="the pool rollout of job a is connected already"):
        group.connect("a")
    first.close()


def test_a_stranger_without_the_secret_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{free.getsockname()[1]}"
    group = Group(server, secret="sesame")
    with pytest.raises(GroupError, match="a stranger"):
        group.connect("a", secret="")
    with pytest.raises(GroupError, match="a stranger"):
        group.connect("a", secret="Sesame")
    group.connect("a").request("rollout")
    assert [event["job"] for event in group.came("joined")] == ["a"]
    group.stop()


def test_a_proof_is_worth_nothing_on_another_connection(group: Group) -> None:
    peer, first = group.raw()
    with peer:
        peer.sendall(b'{"job": "a", "pool": "rollout", "proof": "%s"}\n' % proof_of("", "another").encode())
        assert "stranger" in peer.makefile().readline()
    peer, second = group.raw()
    peer.close()
    assert first != second


def test_others_cannot_reach_the_socket(group: Group) -> None:
    group.connect("a").close()
    assert os.stat(group.server).st_mode & 0o777 == 0o600
    assert os.stat(Path(group.server).parent).st_mode & 0o777 == 0o700


def test_a_server_that_ends_is_one_clear_error(group: Group) -> None:
    a, b = group.connect("a"), group.connect("b")
    a.request("rollout")
    raised = []

    def wait() -> None:
        with pytest.raises(GroupError) as error:
            b.request("rollout")
        raised.append(str(error.value))

    waits = in_thread(wait)
    until(lambda: len(group.came("asks")) == 2)
    group.stop()
    waits.join(LONGEST)
    assert raised == [f"group.server = '{group.server}': it has gone; start the group again with mux.py --resume"]
    a.release()
    with pytest.raises(GroupError, match="it has gone"):
        a.request("train")
    with pytest.raises(GroupError, match="cannot reach it .*start the group with mux.py"):
        group.connect("c")


def test_a_removed_socket_ends_nobody_but_lets_nobody_in(group: Group) -> None:
    a = group.connect("a")
    Path(group.server).unlink()
    a.request("rollout")
    a.release()
    with pytest.raises(GroupError, match="cannot reach it .No such file"):
        Client(group.server, "b", "rollout", "", LONGEST, lambda: None)


def test_waiting_has_an_end(group: Group) -> None:
    signs = []
    a, b = group.connect("a"), group.connect("b", wait_seconds=0.0)
    c = group.connect("c")
    a.request("rollout")
    with pytest.raises(GroupError, match="no permit for rollout within group.wait_seconds = 0"):
        b.request("rollout")
    b.close()
    c.on_wait = lambda: (signs.append(1), a.release() if len(signs) == 2 else None)
    c.request("rollout")
    assert len(signs) >= 2


def test_a_server_that_hangs_is_one_clear_error(monkeypatch) -> None:
    monkeypatch.setattr(permits, "SILENCE", 0.05)
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(f"{folder}/socket")
        hangs.listen()
        with pytest.raises(GroupError, match="it has shown no sign of life for 0.05 s"):
            Client(f"{folder}/socket", "a", "rollout", "", LONGEST, lambda: None)


def test_a_phase_that_hangs_is_named_and_its_permit_comes_back() -> None:
    with TemporaryDirectory() as folder:
        group = Group(f"{folder}/server/socket", phase_seconds=0.0)
        a = group.connect("a")
        a.request("rollout")
        b = group.connect("b")
        b.request("rollout")
        a.close()
        assert group.ended[0] == ("a", "its phase rollout took over mux.phase_seconds = 0")
        group.stop()
