"""The worker's side of process/workers.py: requests come and replies go as lines of JSON, the rest is kept apart."""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence

from rewards import box, leftovers, sandbox, user_files, walls


def keep_worker() -> None:
    """Go on in a child, the worker. This process stays as its keeper: when worker or pool ends, it ends all others.

    Graders may start processes, in sessions of their own too; orphans among them become the keeper's children.
    """
    keeper, prctl, signals = os.getpid(), walls.LIBC.prctl, {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    prctl(box.PARENT_DEATH, signal.SIGTERM)
    prctl(box.SUBREAPER, 1)
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)
        prctl(box.PARENT_DEATH, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if os.getppid() != keeper:
            os._exit(1)
        return
    os.closerange(0, 3)  # the trainer's ends of the pipes must see the worker's death
    status = None
    while status is None:
        if signal.sigwait(signals) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else None
    end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # die of the same signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(keeper, -code)
    os._exit(code)


def end_all() -> None:
    """Kill and reap all processes below this one, except keepers of sandboxes, which end and clean up by themselves.

    Keepers that only remove files are not waited for: that may take long.
    """
    while live := leftovers.descendants(os.getpid()).keys():
        spared = set(filter(sandbox.is_keeper, live))
        if live == spared:
            return
        for pid in live - spared.union(*map(leftovers.descendants, spared)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def serve(load: Callable[[], Callable[..., Sequence[object]]]) -> None:
    """Load the function that answers requests, report success or the error, then answer until the requests end."""
    if sys.platform == "linux":
        keep_worker()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    # Users' functions read an empty stdin and print to stderr or its log, so that they cannot break into the exchange.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(id: int, *fields: object) -> None:
        line = json.dumps([id, *fields]).encode() + b"\n"
        try:
            while line:
                line = line[os.write(replies, line) :]
        except BrokenPipeError:  # the parent was killed before `keep_worker` asked for its death signal
            sys.exit(1)

    error = ""
    try:
        answer = load()
    except BaseException as raised:
        error = user_files.said(raised)[:500]
    reply(0, error)
    for line in requests:
        id, *request = json.loads(line)
        reply(id, *answer(*request))
