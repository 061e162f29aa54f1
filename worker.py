"""The process below a `reward.RewardPool` that runs graders: reads requests, writes rewards, one line of JSON each."""

import ctypes
import json
import os
import signal
import sys
from dataclasses import astuple

from core import Reward
from reward import WARM_UP, grade, resolve_grader

PARENT_DEATH = 1  # of prctl: the signal to get when the parent dies


def guard() -> None:
    """Die with the parent, even when hung, and have this process group killed then: graders may have children."""
    worker, prctl = os.getpid(), ctypes.CDLL(None).prctl
    prctl(PARENT_DEATH, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if not os.fork():
        os.closerange(0, 3)  # the trainer's ends of the pipes must see the worker's death
        prctl(PARENT_DEATH, signal.SIGTERM)
        if os.getppid() == worker:
            signal.sigwait({signal.SIGTERM})
        os.killpg(0, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def work(tasks: list[str]) -> None:
    """Load the graders and say so, then grade until the requests end."""
    if sys.platform == "linux":
        guard()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    # Graders read an empty stdin and print to stderr, so that they cannot break into the exchange.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(id: int, reward: Reward) -> None:
        try:
            os.write(replies, json.dumps([id, *astuple(reward)]).encode() + b"\n")
        except BrokenPipeError:  # the parent was killed before `guard` could hear of it
            sys.exit(1)

    graders, error = {}, ""
    try:
        for task in tasks:
            graders[task] = resolve_grader(task)
            if task in WARM_UP:
                WARM_UP[task]()  # the first call imports: not at a sample's expense
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"[:500]
    reply(0, Reward(0.0, error=error))
    for line in requests:
        id, task, response, answer, row = json.loads(line)
        reply(id, grade(graders[task], response, answer, row))


if __name__ == "__main__":
    work(sys.argv[1:])
