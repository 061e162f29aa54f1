"""The filter of system calls, evaluated here for machines that this one is not; Landlock, tried on folders."""

import errno
import os
import subprocess
import sys

import pytest

from rewards import sandbox, walls

REFUSED, NO_FAMILY = walls.REFUSE | errno.EPERM, walls.REFUSE | errno.EAFNOSUPPORT


def decide(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """Return what the kernel would do about a system call: run the filter's instructions on it."""
    data = number.to_bytes(4, "little") + walls.MACHINES[machine][0].to_bytes(4, "little") + bytes(8)
    data += b"".join(value.to_bytes(8, "little") for value in (*arguments, *[0] * (6 - len(arguments))))
    at = held = 0
    while True:
        kind, value = int.from_bytes(code[at : at + 2], "little"), int.from_bytes(code[at + 4 : at + 8], "little")
        if kind == walls.RETURN:
            return value
        if kind == walls.LOAD:
            held = int.from_bytes(data[value : value + 4], "little")
            at += 8
            continue
        true = {walls.EQUAL: held == value, walls.AT_LEAST: held >= value, walls.ANY_BIT: bool(held & value)}[kind]
        at += 8 * (1 + code[at + 2 if true else at + 3])


@pytest.mark.parametrize("machine", walls.MACHINES)
def test_what_the_filter_refuses(machine, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", machine)))
    code, column = walls.system_calls(), walls.MACHINES[machine][1]
    for name, numbers in walls.CALLS.items():
        assert decide(code, machine, numbers[column]) == REFUSED, name
    assert decide(code, machine, walls.CLONE3[column]) == walls.REFUSE | errno.ENOSYS
    assert decide(code, machine, walls.CLONE[column], 0x10000000) == REFUSED
    assert decide(code, machine, walls.CLONE[column], 0x3D0F00) == walls.ALLOW  # a thread
    for family, kind, answer in ((1, 0x80801, walls.ALLOW), (1, 2, NO_FAMILY), (1, 5, NO_FAMILY), (2, 1, NO_FAMILY)):
        assert decide(code, machine, walls.SOCKETPAIR[column], family, kind) == answer
    for name, (numbers, count) in walls.OWN_ONLY.items():
        assert decide(code, machine, numbers[column], *[0] * count, 7, 7) == walls.ALLOW, name
        for n in range(count):
            assert decide(code, machine, numbers[column], *(int(n == k) for k in range(count))) == REFUSED, name
    for flags, answer in (
        (0x22, walls.ALLOW),
        (0x1, walls.ALLOW),
        (0x21, REFUSED),
        (0x23, REFUSED),
        (0x40022, REFUSED),
    ):
        assert decide(code, machine, walls.MMAP[column], 0, 4096, 3, flags) == answer, hex(flags)
    for number in set(range(500)) - {numbers[column] for numbers in walls.CALLS.values()} - {435}:
        if number != walls.SOCKETPAIR[column]:
            assert decide(code, machine, number) == walls.ALLOW, number
    for level, option in [(1, 2), (1, 9), (6, 7), (6, 8), (1, 34)]:
        assert decide(code, machine, walls.SET_OPTION[column], 3, level, option) == walls.ALLOW
    for option in (7, 8, 32, 33):
        assert decide(code, machine, walls.SET_OPTION[column], 3, 1, option) == REFUSED
    other = next(name for name in walls.MACHINES if name != machine)
    assert decide(code, other, 0) == walls.KILL
    if machine == "x86_64":
        assert decide(code, machine, walls.X32 | 319) == walls.KILL


@pytest.mark.slow
def test_the_filter_keeps_a_program_off_others_of_its_user():
    """As in a box of limits without root, where nothing else does."""
    tried = f"""
import ctypes, os, resource, sys
sys.path.insert(0, {sandbox.HOME!r})
from rewards import walls
libc, other = ctypes.CDLL(None, use_errno=True), os.getppid()
segment, queue, semaphores = libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)
libc.shmat.restype = ctypes.c_ssize_t
none = ctypes.create_string_buffer(256)
def calls(who):
    yield "limits", lambda: resource.prlimit(who, resource.RLIMIT_CORE, resource.prlimit(who, resource.RLIMIT_CORE))
    yield "affinity", lambda: os.sched_setaffinity(who, os.sched_getaffinity(0))
    yield "scheduler", lambda: os.sched_setscheduler(who, os.SCHED_OTHER, os.sched_param(0))
    yield "parameters", lambda: os.sched_setparam(who, os.sched_param(0))
    yield "priority", lambda: os.setpriority(os.PRIO_PROCESS, who, os.getpriority(os.PRIO_PROCESS, who))
shared = {{
    "group": lambda: os.setpriority(os.PRIO_PGRP, 0, os.getpriority(os.PRIO_PGRP, 0)),
    "attach": lambda: checked(libc.shmat(segment, None, 0)),
    "read a segment's state": lambda: checked(libc.shmctl(segment, 2, none)),
    "send": lambda: checked(libc.msgsnd(queue, b"1234567890", 1, 0)),
    "receive": lambda: checked(libc.msgrcv(queue, none, 1, 0, 0)),
    "read a queue's state": lambda: checked(libc.msgctl(queue, 2, none)),
    "raise": lambda: checked(libc.semop(semaphores, b"\\0\\0\\1\\0\\0\\0", 1)),
    "read a semaphore": lambda: checked(libc.semctl(semaphores, 0, 12)),
}}
def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
def done(calls):
    names = []
    for name, call in calls:
        try: call()
        except OSError: continue
        names.append(name)
    return names
before = [done(calls(other)), done(shared.items())]
child = os.fork()
if not child:
    libc.prctl(38, 1, 0, 0, 0)
    walls.load_filter(walls.system_calls())
    os.nice(0)
    print(before, [done(calls(other)), done(shared.items())], done(calls(0)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
for remove, number in ((libc.shmctl, segment), (libc.msgctl, queue)): remove(number, 0, None)
libc.semctl(semaphores, 0, 0)
"""
    ran = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True, timeout=60)
    own = ["limits", "affinity", "scheduler", "parameters", "priority"]
    names = ["group", "attach", "read a segment's state", "send", "receive", "read a queue's state", "raise"]
    assert ran.stdout == f"{[own, [*names, 'read a semaphore']]} [[], []] {own}\n", ran


def test_a_machine_without_a_filter_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", "vax")))
    with pytest.raises(OSError, match="no filter of system calls for vax"):
        walls.system_calls()


@pytest.mark.skipif(not walls.landlock_version(), reason="the kernel has no Landlock")
@pytest.mark.slow
def test_landlock_shows_only_what_it_is_told(tmp_path):
    for name in ("own", "shown", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    program = f"""
import ctypes, os, sys
sys.path.insert(0, {sandbox.HOME!r})
from rewards import walls
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
os.chdir({str(tmp_path)!r})
walls.show_only("own", ["shown"], ("/dev/null",))
for path, mode in [(f"{{name}}/{{file}}", mode) for name in ("own", "shown", "hidden")
                   for file, mode in (("file", "r"), ("file", "w"), ("new", "w"))] + [("/dev/null", "w")]:
    try:
        open(path, mode).close()
        print(path, mode)
    except PermissionError:
        pass
os.mkdir("own/folder")
os.rename("own/new", "own/folder/new")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["own/file r", "own/file w", "own/new w", "shown/file r", "/dev/null w"], ran


def test_an_error_of_landlock_is_told():
    if not walls.landlock_version():
        pytest.skip("the kernel has no Landlock")
    with pytest.raises(OSError, match="Landlock"):
        walls._landlock(walls.RESTRICT_SELF, -1, 0)
