"""How a rank ends: signals, and the exit code and the line that each kind of failure gets."""

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import parallel
from config import ConfigError
from metrics import Clock
from parallel import World
from rewards.pool import GraderError
from trainer import NonFiniteError


class StopSignal:
    """SIGTERM or Ctrl-C ends the run after the current step; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.first = 0  # signal; 0: none

    def __enter__(self) -> "StopSignal":
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.first and signal.SIGINT in (self.first, number):  # torchrun passes the second one on as SIGTERM
            raise KeyboardInterrupt
        self.first = self.first or number

    def agreed(self, world: World) -> bool:
        """Whether any rank was signalled. Signals come at different moments; all act on this answer. Collective."""
        return any(parallel.gather_objects(world, self.first))


def end_with_torchrun() -> None:
    """Leave no rank running when torchrun is killed. (Linux)"""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def refuse(error: Exception) -> int:
    """Say on rank 0 why the run does not start; return the exit code."""
    # torchrun ends the other ranks before they repeat it.
    time.sleep(10.0 if int(os.environ.get("RANK", 0)) else 0.0)
    return _say(str(error), code=2)


def exit_code(work: Callable[[World], None], device: str, timeout_seconds: float, clock: Clock) -> int:
    """Join the other ranks, do the work and return the exit code.

    A user's error, such as a wrong setting, prints one line; our own is raised.
    """
    world = None
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with clock.span("rendezvous"):
            world = parallel.start(device, timeout_seconds)
        work(world)
        return 0
    except ConfigError as error:
        return _say(str(error), code=2)
    except (NonFiniteError, GraderError) as error:
        return _say(str(error), code=1)
    except KeyboardInterrupt:  # the first one ahead of all steps, else the second
        if world and world.is_main:
            print(f"interrupted in {_stage(clock)}", file=sys.stderr, flush=True)
        return 130
    except (OSError, RuntimeError) as error:
        if parallel.is_lost(error):
            return _lost(clock, error)
        if isinstance(error, RuntimeError):
            raise
        return _say(f"{_stage(clock)} of step {clock.step}: {error}", code=1)
    finally:
        if world:
            parallel.stop(world)


def _say(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _stage(clock: Clock) -> str:
    return clock.failed_in or "start"


def _lost(clock: Clock, error: Exception) -> int:
    """Say that other ranks have gone, unless torchrun, which knows who and why, ends this rank first."""
    time.sleep(2.0)
    rank, text = os.environ.get("RANK", 0), str(error).strip() or type(error).__name__
    reason = re.sub(r"^\[.*?\] ", "", text.splitlines()[0])
    reason = reason.partition(". ")[0]  # gloo goes on with advice
    return _say(f"rank {rank} lost the others in {_stage(clock)} of step {clock.step}: {reason}", code=1)
