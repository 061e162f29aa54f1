"""How a rank ends: signals, and the exit code and the line that each kind of failure gets."""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable

import parallel
from config import ConfigError
from environments import EpisodeError
from metrics import Clock
from parallel import World
from process.command import CLOSED, output_is_closed
from process.permits import GroupError
from process.workers import WorkerError
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


class CallbackError(RuntimeError):
    """A user's callback has failed: which one, how and where."""


def check_callbacks(callbacks: object) -> None:
    """Raise ConfigError for what is no list of functions."""
    if callable(callbacks):
        raise ConfigError("callbacks: one function; give a list of functions")
    for callback in callbacks if isinstance(callbacks, Collection) else [callbacks]:
        if not callable(callback):
            raise ConfigError(f"callbacks: {callback!r:.60} is no function")


def call(callbacks: Iterable[Callable[..., object]], *given: object) -> None:
    """Call functions of the user. Raises CallbackError when one of them raises."""
    for callback in callbacks:
        try:
            callback(*given)
        except (Exception, SystemExit) as error:
            said = traceback.format_exception_only(error)[-1].strip()
            place = traceback.extract_tb(error.__traceback__)[:2][-1]
            name = getattr(callback, "__qualname__", repr(callback))
            raise CallbackError(f"callback {name}: {said} ({place.filename}:{place.lineno})") from error


def refuse(error: Exception, code: int = 2) -> int:
    """Say on one rank why the run does not start, or not go on; return the exit code."""
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return CLOSED
    if os.environ.get("RANK", "0") != "0":
        _wait_for_torchrun(10.0)  # before this rank repeats it
    return _fail(str(error), code)


def _wait_for_torchrun(seconds: float) -> None:
    """Wait where torchrun has started this rank: after the failure of another it ends this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(seconds)


def exit_code(work: Callable[[World], None], device: str, timeout_seconds: float, clock: Clock) -> int:
    """Join the other ranks, do the work and return the exit code.

    A user's error, such as a wrong setting, prints one line; our own its traceback. A rank that fails among others ends
    the process instead of returning.
    """
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with clock.span("rendezvous"):
            world = parallel.start(device, timeout_seconds)
        work(world)
        parallel.stop(world)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error, clock)
    parallel.abandon(code)
    return code


def _explain(error: BaseException, clock: Clock) -> int:
    """Say why the work has failed; return the exit code."""
    if isinstance(error, ConfigError):
        return refuse(error)
    if isinstance(error, GroupError):  # both pools of a job lose the group's server
        return refuse(error, code=1)
    if isinstance(error, NonFiniteError | WorkerError | EpisodeError | CallbackError):
        return _fail(str(error), code=1)
    stage = clock.failed_in or "start"
    place = f"{stage} of step {clock.step}"
    if isinstance(error, KeyboardInterrupt):  # the first one ahead of all steps, else the second
        if os.environ.get("RANK", "0") == "0":
            print(f"interrupted in {stage}", file=sys.stderr, flush=True)
        return 130
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return _fail(f"{place}: the program that reads the output has ended", code=1)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if isinstance(error, OSError | RuntimeError) and parallel.is_lost(error) and not is_alone:
        _wait_for_torchrun(2.0)  # it knows who has gone and why
        text = str(error).strip() or type(error).__name__
        reason = re.sub(r"^\[.*?\] ", "", text.splitlines()[0]).partition(". ")[0]  # gloo goes on with advice
        return _fail(f"rank {os.environ.get('RANK', 0)} lost the others in {place}: {reason}", code=1)
    if isinstance(error, OSError):
        return _fail(f"{place}: {error}", code=1)
    traceback.print_exception(error)
    return 1


def _fail(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code
