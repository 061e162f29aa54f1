"""Untrusted programs: right ones pass, hostile ones score nothing, harm nothing and leave nothing behind."""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import pytest
from conftest import ROOT, thorough

from config import ConfigError
from core import Prompt
from rewards import box, leftovers, sandbox, walls
from rewards.sandbox import Isolation, Limits, run
from settings import Config, RunConfig, box_of_programs, check_hidden

pytestmark = pytest.mark.slow  # processes and whole runs

FOUND = {kind: sandbox.try_isolation(kind) for kind in sandbox.ISOLATIONS}
LIMITS = Limits(seconds=10.0)
# What a mere resource limit cannot prevent without Landlock: with a throw-away user, and without one.
REACHES_DEVICES = {"memory that was mapped"}
REACHES_THE_USER = REACHES_DEVICES | {
    "reads outside files",
    "deletes outside files",
    "writes outside files",
    "links to outside",
    "folder replaced by a link",
    "connects to a socket file",
    "reads memory of others",
    "fake verdict on others' pipes",
    "signals to its parents",
    "stops the test",
    "reads the test",
}


@pytest.fixture(params=sandbox.ISOLATIONS)
def how(request) -> Isolation:
    """Every isolation that works on this machine."""
    found, cause = FOUND[request.param]
    if not found:
        pytest.skip(f"{request.param}: {cause}")
    return found


@pytest.fixture
def clean(tmp_path, monkeypatch):  # tmp_path first: pytest makes it elsewhere
    """A folder for boxes that must be empty afterwards, and a reaper that must have nothing to reap."""
    boxes = Path(tempfile.mkdtemp())
    boxes.chmod(0o711)  # unlike pytest's folders, other users can pass through it
    monkeypatch.setattr(tempfile, "tempdir", str(boxes))
    before = set(leftovers.descendants(os.getpid()))
    ctypes.CDLL(None).prctl(box.SUBREAPER, 1)  # what loses its parent becomes a child of this process
    yield boxes
    ctypes.CDLL(None).prctl(box.SUBREAPER, 0)
    # Keepers may remove files after the verdict.
    assert wait_for(lambda: all(keeper.poll() is not None for keeper in sandbox._cleaning))
    boxes.rmdir()
    left = set(leftovers.descendants(os.getpid())) - before
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


def stdin_case(stdin: str, stdout: str) -> dict[str, str]:
    return {"stdin": stdin, "stdout": stdout}


# ---- programs that mean well

FIRST = next((name for name, (found, _) in FOUND.items() if found), sandbox.ISOLATIONS[0])
by_the_first = pytest.mark.parametrize(
    "how", [name if name == FIRST else thorough(name) for name in sandbox.ISOLATIONS], indirect=True
)


@by_the_first
@pytest.mark.parametrize(
    "program, stdin, stdout, passes",
    [
        (hostile.GOOD, "6 7\n", "42", True),
        (hostile.GOOD, "6 7\n", "42\n\n", True),
        (hostile.GOOD, "6 8\n", "42", False),
        ("print('a  ')\nprint('b')\nprint()", "", "a\nb", True),
        ("print('a', 'b')", "", "a  b", False),
        ("print('a\\n\\nb')", "", "a\nb", False),
        ("print(' a')", "", "a", False),
        ("pass", "", "", True),
        ("import sys; print(sys.stdin.read().upper(), end='')", "é\u20ac\n" * 20000, "É\u20ac\n" * 20000, True),
        ("import sys; print(len(sys.stdin.buffer.read()))", "x" * 10**6, "1000000", True),
        ("if __name__ == '__main__': print(__file__)", "", "program.py", False),
        ("if __name__ == '__main__': print(1)", "", "1", True),
        ("open('f', 'w').write('hi'); print(open('f').read())", "", "hi", True),
        ("import tempfile; f = tempfile.TemporaryFile(); print(f.write(b'123'))", "", "3", True),
        ("import os; print(sorted({*os.environ} - {'PWD'}))", "", str(sorted(box.ENVIRONMENT)), True),
        ("import subprocess; print(subprocess.run(['echo', 'a'], capture_output=True).stdout)", "", "b'a\\n'", True),
        ("import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()", "", "1", True),
        ("import decimal, fractions, heapq, itertools, json, math, numbers, re, statistics; print(1)", "", "1", True),
        ("import torch", "", "", False),
        ("import multiprocessing as m; p = m.Pipe(); p[0].send(1); print(p[1].recv())", "", "1", True),
        ("import shutil; open('f', 'w').write('hi'); shutil.copy('f', 'g'); print(open('g').read())", "", "hi", True),
        (
            "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); print(r.prlimit(0, r.RLIMIT_CORE))",
            "",
            "(0, 0)",
            True,
        ),
        ("import os; os.sched_setaffinity(0, os.sched_getaffinity(0)); print(os.nice(1) > 0)", "", "True", True),
        ("import sqlite3; sqlite3.connect('f').execute('create table t (a)'); print(1)", "", "1", True),
        (
            "import subprocess as s, sys; print(s.run([sys.executable, '-c', '7'], check=True).returncode)",
            "",
            "0",
            True,
        ),
        (
            "def f(n): return n and 1 + f(n - 1)\nimport sys; sys.setrecursionlimit(10**5); print(f(20_000))",
            "",
            "20000",
            True,
        ),
        (
            "open('own.py', 'w').write('x=3')\nimport importlib as i\ni.invalidate_caches()\nimport own\nprint(own.x)",
            "",
            "3",
            True,
        ),
        (
            "import sys; print(sys.argv, __name__, __file__ == sys.path[0] + '/program.py')",
            "",
            "['program.py'] __main__ True",
            True,
        ),
        (
            "'Doc'\nfrom __future__ import annotations\nprint(__doc__, [x for x in dir() if x[0] != '_'])",
            "",
            "Doc ['annotations']",
            True,
        ),
        ("def f(n): return n and 1 + f(n - 1)\nprint(f(997))", "", "997", True),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", "", "True", True),
        ("import unittest\nclass A(unittest.TestCase):\n    def test(self): print(1)\nunittest.main()", "", "1", True),
        ("# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))", "", "'\\xc3\\xa9'", True),
        *(
            (f"print(1)\n{end}\nprint(2)", "", "1", True)
            for end in ("exit()", "quit()", "exit(0)", "import sys; sys.exit()")
        ),
        *((f"print(1)\n{end}", "", "1", False) for end in ("exit(3)", "quit('no')")),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0.01, 1)))", "", "1", True),
        ("from concurrent.futures import ThreadPoolExecutor as T; print(*T(2).map(abs, [-1]))", "", "1", True),
    ],
)
def test_programs_with_stdin_and_stdout(how, clean, program, stdin, stdout, passes):
    outcome = run(program, stdin_case(stdin, stdout), LIMITS, how)
    assert outcome.passed == passes, outcome
    assert bool(outcome.cause) != passes and not outcome.timed_out and outcome.seconds > 0


STACK = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
def total(stack): return sum(stack.items)
def apply(f, x): return f(x)
def keys(**kwargs): return kwargs
def up(n):
    for i in range(n): yield i
def echo(x): return x
limit = 7
"""


@by_the_first
@pytest.mark.parametrize(
    "program, test, passes",
    [
        (hostile.GOOD_FUNCTION, hostile.TEST, True),
        (hostile.GOOD_FUNCTION, "assert mul(6, 7) == 43", False),
        (hostile.GOOD_FUNCTION, "assert mul(2, [1]) == [1, 1] and mul('a', 2) == 'aa'", True),
        (hostile.GOOD_FUNCTION, "def test():\n    assert mul(1, 1) == 2\ntest()", False),
        (hostile.GOOD_FUNCTION, "import math\nassert math.isclose(mul(0.1, 3), 0.3)", True),
        (hostile.GOOD_FUNCTION, "assert div(1, 1) == 1", False),
        (hostile.GOOD_FUNCTION, "import sys; sys.exit(0)", False),
        (hostile.GOOD_FUNCTION, "def f(", False),
        (hostile.GOOD_FUNCTION, "try: mul('a', 'b')\nexcept TypeError: pass\nelse: assert False", True),
        ("def mul(a, b): raise ValueError('no ' + str(a))", "try: mul(1, 2)\nexcept ValueError as e: x = str(e)", True),
        ("if __name__ == '__main__': raise ValueError\nx = 3", "assert x == 3", True),
        (STACK, "s = Stack(1)\nassert s.push(2).push(3).pop() == 3 and len(s) == 2 and s[0] == 1", True),
        (STACK, "s = Stack((1, 'a'), {2: {3.5}}, b'x', None, 1j)\nassert s.items[1] == {2: {3.5}}", True),
        (STACK, "assert total(Stack(1, 2)) == 3 and limit == 7 and keys(a=1) == {'a': 1}", True),
        (STACK, "assert list(up(3)) == [0, 1, 2]", True),
        (STACK, "s = Stack()\ns.items = [2, 3]\nassert total(s) == 5 and s.pop() == 3", True),
        ("class A:\n    x = property(lambda _: 1, lambda *_: None)\na = A()", "a.x = 5\nassert a.x == 5", False),
        ("try: exit()\nexcept SystemExit: x = 1", "assert x == 1", True),
        ("def f(): exit()", "f()", False),
        ("exit()", "", False),
        (hostile.GOOD_FUNCTION, "exit()", False),
        (STACK, "assert Stack(1) == Stack(1)", False),
        (STACK, "assert Stack(1)", False),
        (STACK, "x = [float('inf'), -0.0, '\\ud800', (1, [2, (3,)]), frozenset({1}), {(1, 2): None}, True]\n"
                "assert echo(x) == x and type(echo((1,))) is tuple and echo(float('nan')) != echo(0)", True),
    ],
)  # fmt: skip
def test_programs_with_assertions(how, clean, program, test, passes):
    outcome = run(program, {"test": test}, LIMITS, how)
    assert outcome.passed == passes, outcome
    assert bool(outcome.cause) != passes


@by_the_first
def test_sets_have_the_same_order_every_time(how, clean):
    line = "print(*{'b', 'a', 'c', 'd'}, hash('a'))"
    seeded = subprocess.run([how.python, "-S", "-c", line], env=box.ENVIRONMENT, capture_output=True, text=True)
    assert run(line, stdin_case("", seeded.stdout), LIMITS, how).passed
    served = {"test": f"assert f() == {seeded.stdout.split()[:4]}"}
    assert run("def f(): return [*{'b', 'a', 'c', 'd'}]", served, LIMITS, how).passed


@by_the_first
@pytest.mark.parametrize(
    "program, test",
    [
        ("def f(): return 10**5000", "assert f() == 10**5000 and f() - 1 == 10**5000 - 1"),
        ("def f(x): return -x", "assert f(10**5000) == -10**5000 and f(True) == -1 and f(2**63) == -2**63"),
        (
            "def f(n):\n    x = ()\n    for _ in range(n): x = (x,)\n    return x",
            "x = ()\nfor _ in range(600): x = (x,)\nassert f(600) == x\nx, n = f(10_000), 0\n"
            "while x: [x], n = x, n + 1\nassert n == 10_000",
        ),
        (
            "graph = {'a': [], 'b': ({1, (2, 3)},)}\ngraph['a'].append(graph)\ndef f(): return [len(graph)]",
            "assert f() == [2] and graph['a'][0] is graph and graph['b'] == ({(2, 3), 1},)",
        ),
        ("import sys\nown = sys.modules\ndef f(x): return [x, x, [x]]", "assert f(()) == [(), (), [()]]"),
        ("def f(): return {'a'}['b']", "try: f()\nexcept TypeError as e: assert 'not subscriptable' in e.args[0]"),
        ("def f(): return {}['a']", "try: f()\nexcept KeyError as e: assert e.args == ('a',) and str(e) == \"'a'\""),
        ("def f(): return b'\\xff'.decode()", "try: f()\nexcept UnicodeDecodeError as e: assert e.start == 0"),
        (
            "class E(ValueError): pass\ndef f(): raise E(3, f)",
            "try: f()\nexcept ValueError as e: assert e.args[0] == 3",
        ),
        ("def f(): raise StopIteration(1)", "try: next(map(lambda _: f(), [1]))\nexcept RuntimeError: pass"),
    ],
)
def test_right_programs_pass_whatever_their_data(how, clean, program, test):
    assert run(program, {"test": test}, LIMITS, how).passed
    outcome = run(program, {"test": test + "\nassert 0"}, LIMITS, how)
    assert not outcome.passed and "AssertionError" in outcome.cause, outcome


TOLD = {  # what the test can catch on purpose
    **{f"raises {name}": f"def f(x): raise {name}" for name in ("StopIteration", "StopAsyncIteration", "Exception")},
    "a stop of its own": "class E(StopIteration): pass\ndef f(x): raise E",
    "no data": "class f:\n    def __init__(self, x): pass\n    def __next__(self): raise StopIteration",
}
GONE = {  # what ends the program, and the test with it
    **{f"raises {name}": f"def f(x): raise {name}" for name in ("GeneratorExit", "KeyboardInterrupt", "SystemExit(0)")},
    "exits": "import os\ndef f(x): os._exit(0)",
    "closes its pipes": "import os\ndef f(x): os.closerange(3, 256)",
}
# Each holds for a function that doubles. All but the last must not hold for one that gives no number.
TESTS = {
    "map": "assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 2)]))",
    "filter": "assert list(filter(lambda x: f(x) != 2 * x, [1, 2])) == []",
    "loop": "for x in map(f, [1, 1]): assert x == 2",
    "next": "assert next(map(f, [1]), 2) == 2",
    "sentinel": "assert list(iter(lambda: f(1), 2)) == []",
    "zip": "assert all(x == y for x, y in zip(map(f, [1, 2]), [2, 4]))",
    "generator": "assert sum(f(x) - 2 * x for x in [1, 2]) == 0",
    "yield from": "def g(): yield from map(f, [1])\nassert all(x == 2 for x in g())",
    "async": """
import asyncio
class It:
    def __aiter__(self): return self
    async def __anext__(self): return f(1)
async def go():
    async for x in It():
        assert x == 2
        return
asyncio.run(go())""",
    "close": "def g():\n    try: yield\n    finally: assert f(1) == 2\nx = g(); next(x); x.close()",
    "thread": """
from threading import Thread
out = []
thread = Thread(target=lambda: out.append(f(1)))
thread.start(); thread.join()
assert out == [2]""",
    "error": "try: f(1)\nexcept BaseException: pass",
}
HELD = f"""
held = []
for name, text in {TESTS}.items():
    try: exec(text, dict(globals()))
    except BaseException: continue
    held.append(name)
assert held == """


def test_what_a_program_raises_cannot_end_the_tests_own_iteration():
    assert run("def f(x): return 2 * x", {"test": HELD + str([*TESTS])}, LIMITS).passed
    for name, program in TOLD.items():
        assert run(program, {"test": HELD + "['error']"}, LIMITS).passed, name
    for name, program in GONE.items():
        assert "no answer" in run(program, {"test": HELD + "held"}, LIMITS).cause, name


@by_the_first
def test_the_cause_is_told(how):
    assert run("x = 1 / 0", stdin_case("", ""), LIMITS, how).cause == "exit code 1: ZeroDivisionError: division by zero"
    cause = run("def f(): return {}['k']", {"test": "assert f() == 1"}, LIMITS, how).cause
    assert "KeyError" in cause
    assert "ZeroDivisionError" in run("1 / 0", {"test": "assert f() == 1"}, LIMITS, how).cause
    slow = run("while True: pass", stdin_case("", ""), Limits(seconds=0.5), how)
    assert slow.timed_out and slow.cause == "did not end within 0.5 s" and slow.seconds >= 0.5


@pytest.mark.parametrize("case", [{}, {"stdin": ""}, {"stdin": "", "stdout": 1}, {"test": "", "stdin": ""}])
def test_a_case_that_is_none(case):
    with pytest.raises(ValueError, match="a test case has"):
        run("", case, LIMITS)


# ---- hostile ones


@pytest.fixture
def bait(tmp_path):
    """A folder and servers that give the answer away to whoever reaches them; returns how to spell them."""
    folder = tmp_path / "bait"
    folder.mkdir()
    (folder / "secret.txt").write_text("ANSWER 42\n")
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind(str(folder / "socket"))
    servers[1].listen()

    def give_away(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"42\n")

    for server in servers:
        threading.Thread(target=give_away, args=(server,), daemon=True).start()
    os.environ["PLAINROLL_SECRET"] = "ANSWER"
    yield folder, {"FOLDER": str(folder), "PORT": str(servers[0].getsockname()[1]), "MARK": f"mark-{os.getpid()}"}
    del os.environ["PLAINROLL_SECRET"]
    for server in servers:
        server.close()


def spell(program: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        program = program.replace(word, value)
    return program


def test_there_are_enough_hostile_programs():
    assert len(hostile.PROGRAMS) >= 25 and len(hostile.FUNCTIONS) >= 10


@pytest.mark.slow
def test_hostile_programs_score_nothing_and_leave_nothing(how, clean, bait):
    folder, words = bait
    stdin, test = stdin_case(hostile.STDIN, hostile.EXPECTED), {"test": hostile.TEST}
    skipped = set()
    if how.kind == "limits" and walls.landlock_version() < walls.SEES_SIGNALS:
        skipped = REACHES_THE_USER if os.geteuid() else REACHES_DEVICES
    attacks = [(name, spell(text, words), stdin) for name, text in hostile.PROGRAMS.items() if name not in skipped]
    attacks += [(name, text, test) for name, text in hostile.FUNCTIONS.items() if name not in skipped]
    tight = Limits(seconds=1.0, memory_bytes=256 * 2**20)
    busy = threading.Event()
    good = []

    def attack(name: str, program: str, case: dict) -> tuple[str, sandbox.Outcome]:
        return name, run(program, case, tight, how)

    def do_good() -> None:
        while not good or not busy.wait(0.5):  # now and then: the attacks need the cores
            good.append(run(hostile.GOOD, stdin, LIMITS, how))
            good.append(run(hostile.GOOD_FUNCTION, test, LIMITS, how))

    beside = threading.Thread(target=do_good)
    beside.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(attack, *zip(*attacks)))
    finally:
        busy.set()
        beside.join()
    assert [(name, outcome) for name, outcome in outcomes if outcome.passed or not outcome.cause] == []
    assert len(good) >= 2 and all(outcome.passed for outcome in good), good
    assert (folder / "secret.txt").read_text() == "ANSWER 42\n" and len(list(folder.iterdir())) == 2
    places = [
        *map(Path, "/ /usr /etc /home /tmp /var/tmp /dev/shm /run/lock".split()),
        Path(os.__file__).parent,
        folder,
    ]
    assert not [place for place in places if (place / words["MARK"]).exists()]


@pytest.mark.skipif("os.geteuid() or not FOUND['namespaces'][0]", reason="becomes another user, so it needs root")
def test_without_root_a_program_cannot_interrupt_its_box():
    """There process 1 has the program's user, and the kernel gives it each signal that it has a handler for."""
    signals = [f"import os, signal; os.kill({pid}, signal.SIGINT)" for pid in ("1", "os.getppid()", "0")]
    script = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
from rewards import box, sandbox, walls
try:
    walls.call("unshare", box.NEW_USER)
except OSError:
    sys.exit(77)
for name, text in ("uid_map", "1000 0 1"), ("setgroups", "deny"), ("gid_map", "1000 0 1"):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(text)
how, cause = sandbox.try_isolation("namespaces")
assert how, cause
for program in {signals!r}:
    print(sandbox.run(program, {{"stdin": "", "stdout": "7"}}, sandbox.Limits(seconds=10.0), how).cause)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    if told.returncode == 77:
        pytest.skip("no user namespaces here")
    assert told.stdout.splitlines() == ["wrong output", "wrong output", "died of SIGINT: KeyboardInterrupt"], (
        told.stderr
    )


def test_the_verdict_stands_when_the_program_ends(how, clean, monkeypatch, tmp_path):
    """Removing its files may last: that is not at the program's expense, nor at the caller's."""
    slow = f"""
import os, sys, time; sys.path.append({{home!r}}); from rewards import leftovers; remove = leftovers.remove_tree
def remove_late(path):
    while not os.path.exists({str(tmp_path / "gate")!r}): time.sleep(0.01)
    remove(path)
leftovers.remove_tree = remove_late
"""
    monkeypatch.setattr(sandbox, "KEEPER", slow + sandbox.KEEPER)
    monkeypatch.setattr(sandbox, "CLEANING_SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "SETUP_SECONDS", 60.0)
    try:
        outcomes = [run("print(1)", stdin_case("", "1"), LIMITS, how) for _ in range(2)]
        assert all(outcome.passed for outcome in outcomes)
        assert len(sandbox._cleaning) == len(list(clean.iterdir())) == 2
        outcome = run("import os\nos._exit(0)", {"test": "mul(6, 7)"}, LIMITS, how)
        assert "ended before the test did" in outcome.cause and not outcome.timed_out, outcome
        monkeypatch.setattr(sandbox, "MOST_CLEANING", 1)
        monkeypatch.setattr(sandbox, "SETUP_SECONDS", 0.0)
        with pytest.raises(sandbox.SandboxError, match="files of . programs are still being removed"):
            run("print(1)", stdin_case("", "1"), LIMITS, how)
    finally:
        (tmp_path / "gate").touch()


def test_files_elsewhere_go_with_their_user_where_there_is_no_landlock(clean, monkeypatch):
    how, cause = FOUND["limits"]
    if not how or os.geteuid():
        pytest.skip(cause or "only root has throw-away users")
    without = "import sys; sys.path.append({home!r}); from rewards import walls; walls.landlock_version = lambda: 0\n"
    monkeypatch.setattr(sandbox, "KEEPER", without + sandbox.KEEPER)
    mark = f"mark-{os.getpid()}"
    program = f"for name in ('/tmp', '/var/tmp'): open(name + '/{mark}', 'w').close()\nprint(1)"
    assert run(program, stdin_case("", "1"), LIMITS, how).passed  # so it could
    assert wait_for(lambda: not [name for name in ("/tmp", "/var/tmp") if os.path.exists(f"{name}/{mark}")])


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(100): open(f'{i}', 'w').close()",
        "for i in range(3): open(f'{i}', 'wb').write(bytes(900_000))",
        "import os\nfor _ in range(100): os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('a')\nfor i in range(100): open(f'a/{i}', 'w').close()",
    ],
)
def test_files_are_limited_in_number_and_bytes(how, clean, monkeypatch, program):
    monkeypatch.setattr(box, "MOST_FILES", 50)
    limits = Limits(seconds=10.0, file_bytes=2**20)
    outcome = run(f"{program}\nimport time; time.sleep(1000)", stdin_case("", ""), limits, how)
    assert not outcome.passed and not outcome.timed_out
    assert how.kind == "namespaces" or outcome.cause.startswith("made over 50 files")


def test_memory_counts_and_ends_where_the_first_thread_has_ended(how, clean):
    program = (
        hostile.HEADLESS
        + "for _ in range(4):\n    if not os.fork(): end_first_thread(80 << 20)\n    time.sleep(0.3)\ntime.sleep(99)"
    )
    outcome = run(program, stdin_case("", ""), Limits(seconds=10.0, memory_bytes=256 * 2**20), how)
    assert outcome.cause.startswith("used over"), outcome


def test_a_killed_keeper_leaves_nothing(how, clean):
    """As one that the machine killed for memory."""
    if how.kind == "limits" and os.geteuid():
        pytest.skip("only a throw-away user tells which processes were its program's")
    program = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)"
    others = set(leftovers.descendants(os.getpid()))  # of tests before
    both = 4 if how.kind == "namespaces" else 3  # keeper, first process of namespaces, program, its child
    with ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(run, program, stdin_case("", ""), Limits(seconds=60.0), how)
        assert wait_for(lambda: len(set(leftovers.descendants(os.getpid())) - others) >= both)
        mine, made = f"PPid:\t{os.getpid()}\n", set(leftovers.descendants(os.getpid())) - others
        [keeper] = [p for p in made if mine in Path(f"/proc/{p}/status").read_text()]
        os.kill(keeper, 9)
        assert outcome.result(60).cause == "the program ended its keeper"


def test_everything_ends_with_a_killed_caller(how, clean):
    """After SIGKILL of the caller no process and no file is left, daemons included."""
    program = hostile.PROGRAMS["daemon that outlives its parents"].replace("os._exit(0)", "time.sleep(1000)")
    code = f"""
import sys
sys.path.insert(0, {sandbox.HOME!r})
from rewards import sandbox
how = sandbox.Isolation({how.kind!r}, {how.python!r}, {how.prefix!r})
sandbox.run({program!r}, {{"stdin": "", "stdout": ""}}, sandbox.Limits(seconds=100.0), how)
"""
    caller = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(clean)})
    try:
        assert wait_for(lambda: len(leftovers.descendants(caller.pid)) >= 5)  # the keeper and four generations
        everyone = list(leftovers.descendants(caller.pid))
    finally:
        caller.kill()
        caller.wait()
    assert wait_for(lambda: not set(everyone) & set(leftovers.descendants(os.getpid())))
    assert wait_for(lambda: not list(clean.iterdir()))


@by_the_first
def test_a_keeper_is_found_in_a_folder_of_any_name(how, tmp_path):
    home = tmp_path / "a'b\"{home}\n\u00e9"
    shutil.copytree(Path(sandbox.__file__).parent, home / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import sys
sys.path.insert(0, {str(home)!r})
from rewards import sandbox
how = sandbox.Isolation({how.kind!r}, {how.python!r}, {how.prefix!r})
print(sandbox.run("print(input())", {{"stdin": "7", "stdout": "7"}}, sandbox.Limits(), how).passed, sandbox.__file__)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert ran.stdout == f"True {home / 'rewards/sandbox.py'}\n", ran.stderr


@by_the_first
def test_a_keeper_that_cannot_start_is_no_fault_of_the_program(how, monkeypatch):
    monkeypatch.setattr(sandbox, "KEEPER", "import nonsense")
    with pytest.raises(sandbox.SandboxError, match="cannot start a program: .*No module named 'nonsense'"):
        sandbox.run("print(1)", {"stdin": "", "stdout": "1"}, sandbox.Limits(), how)


def test_a_run_whose_data_programs_could_read_is_refused(monkeypatch, tmp_path):
    """As in a container whose project lies below /usr."""
    prompts = [Prompt(0, (), "", "", "code", where=f"{tmp_path}/usr/src/rows.parquet row 7")]
    (tmp_path / "link").symlink_to(tmp_path / "usr")
    outside, inside = (Config(run=RunConfig(dir=str(tmp_path / folder))) for folder in ("runs", "usr/src/runs"))
    box = sandbox.isolation()
    check_hidden(outside, [Prompt(0, (), "", "", "code", where=f"{tmp_path}/rows.jsonl:7")], box)
    for shown in ("usr", "link"):
        monkeypatch.setattr("settings.box_paths", lambda prefix, shown=shown: [str(tmp_path / shown)])
        for config, rows, said in ((outside, prompts, "parquet is below .*move the data"), (inside, [], "run.dir")):
            with pytest.raises(ConfigError, match=said):
                check_hidden(config, rows, box)


def test_environments_of_a_users_file_may_run_programs(monkeypatch):
    """So the data is kept from these, too, as far as there is a box."""
    assert box_of_programs(True, []) == box_of_programs(False, ["guess", "own.py:calculator"]) == sandbox.isolation()
    assert box_of_programs(False, ["guess", "http://localhost:80/play"]) is None

    def no_box():
        raise sandbox.SandboxError("none")

    monkeypatch.setattr(sandbox, "isolation", no_box)
    assert box_of_programs(False, ["own.py:calculator"]) is None
    with pytest.raises(sandbox.SandboxError):
        box_of_programs(True, [])


def test_a_machine_without_room_is_no_fault_of_the_program(how, clean, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    open_files = len(os.listdir("/proc/self/fd"))
    for place in ("tempfile.mkdtemp", "os.memfd_create", "os.pipe"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            for case in ({"stdin": "", "stdout": "1"}, {"test": "f()"}):
                with pytest.raises(sandbox.SandboxError, match="cannot start a program: .*No space left"):
                    sandbox.run("print(1)", case, sandbox.Limits(), how)
    assert len(os.listdir("/proc/self/fd")) == open_files and not list(clean.iterdir())


@pytest.mark.skipif("os.geteuid() or not FOUND['namespaces'][0]", reason="mounts, so it needs root and namespaces")
def test_mounts_below_what_is_shown_are_read_only_too():
    """In a mount namespace of its own, so that the machine has nothing of it."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(sandbox.__file__).parent.parent)!r})
from rewards import box, sandbox, walls
walls.call("unshare", box.NEW_MOUNT)
walls.call("mount", None, b"/", None, box.RECURSIVE | box.PRIVATE, None)
walls.call("mount", b"tmpfs", b"/usr/local/games", b"tmpfs", 0, b"mode=1777")
found, _ = sandbox.try_isolation("namespaces")
program = "try: open('/usr/local/games/x', 'w')\\nexcept OSError as error: print(error.strerror)"
print(sandbox.execute(program, "", sandbox.Limits(), found)[1].decode())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "Read-only file system\n\n", ran.stdout + ran.stderr


def wait_for(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_box_that_cannot_be_built_is_an_error():
    with pytest.raises(sandbox.SandboxError, match="cannot start a program"):
        run("", stdin_case("", ""), LIMITS, Isolation("limits", "/no/python", "/usr"))


def test_no_isolation_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(sandbox.SandboxError, match="needs Linux.*allow user namespaces or install bubblewrap"):
        sandbox.isolation.__wrapped__()


@pytest.mark.parametrize(
    "user, version, told, silent",
    [
        (0, 3, "keeps them to their own files", "YOUR"),
        (1000, 7, "CHANGE MODES AND TIMES OF YOUR FILES", "PROCESSES"),
        (1000, 3, "END YOUR PROCESSES", "own files"),
        (1000, 0, "YOUR FILES AND PROCESSES", "Landlock"),
    ],
)
def test_a_run_tells_what_limits_let_through(monkeypatch, user, version, told, silent):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(walls, "landlock_version", lambda: version)
    text = str(Isolation("limits", "python", "/usr"))
    assert told in text and silent not in text and (not user) != (sandbox.WAY_OUT in text)
