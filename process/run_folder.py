"""The run folder: a lock that keeps other runs out, and the settings of the run that is in it."""

import fcntl
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import parallel
from config import ConfigError, Dataclass, dump_toml
from metrics import Clock
from parallel import World
from process.watchdog import Watchdog, tell_failure

LOCK_SECONDS = 10.0  # a killed run may take so long to let go of its folder


@contextmanager
def guarded(config: Dataclass, folder: Path, world: World, clock: Clock) -> Iterator[None]:
    """Have the folder for this run alone, with its settings in it, and name the rank that holds the others up.

    Raises ConfigError as `locked` does.
    """
    with ExitStack() as stack:
        if world.is_main:
            stack.enter_context(locked(folder))
            write_settings(config, folder)
        if world.spans_machines:
            check_shared(folder, world)
        if world.size > 1:
            stack.enter_context(Watchdog(world, clock, folder / "stacks"))
        try:
            yield
        except BaseException:
            if world.store:
                with suppress(Exception):  # the store's rank may be the first that is gone
                    tell_failure(world)
            raise


def check_shared(folder: Path, world: World) -> None:
    """Raise ConfigError, on all ranks, if a rank of another machine has another folder there. Collective."""
    mark = folder / f".shared_{uuid.uuid4().hex}"  # no machine has looked for it before
    if world.is_main:
        mark.touch()
    mark = folder / parallel.broadcast_object(world, mark.name)
    try:
        parallel.check_alike(world, {f"run.dir = {str(folder)!r}": mark.exists()})
    finally:
        if world.is_main:
            mark.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the run folder and keep other runs out of it: they would remove each other's checkpoints.

    Raises ConfigError when it cannot be written, or another run does not leave it within `LOCK_SECONDS`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir = {str(folder)!r}: another run is using it; end that, or choose another folder"
                    ) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield


def write_settings(config: Dataclass, folder: Path) -> None:
    """Write config.toml. Raises ConfigError when the folder cannot be written."""
    part = folder / ".config.toml"
    try:
        part.write_text(dump_toml(config), encoding="utf-8")
        part.replace(folder / "config.toml")  # a kill leaves the one before whole: --resume reads it
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir = {str(folder)!r}: cannot write it ({error.strerror}); choose another")
