"""Starts the ranks of this machine by torchrun; divides the cores among them and prints errors in one line."""

import argparse
import ctypes
import logging
import os
import re
import signal
import sys
import threading

import torch

from config import ConfigError
from process.threads import before_torch

COUNT = r"[1-9]\d{0,8}"
STREAMS = r"[0-3]|(\d+:[0-3],)*\d+:[0-3]", "a number from 0 to 3, or such numbers by rank, as 0:1,1:3"
TEXT = ".+", "some text"
RANKS = r"[1-9]\d{0,2}|10[01]\d|102[0-4]", "a number from 1 to 1024"
OPTIONS = {  # torchrun's own: a pattern for each, and its meaning
    "nnodes": (rf"{COUNT}(:{COUNT})?", "a number of machines, such as 4, or a range, such as 2:4"),
    "node_rank": (r"\d{1,9}", "the number of a machine, from 0"),
    "max_restarts": (r"\d{1,9}", "a number of restarts, from 0"),
    "monitor_interval": (r"(?=.*[1-9])\d{1,9}(\.\d+)?", "a number of seconds over 0"),
    "master_port": (r"\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]", "a port from 0 to 65535"),
    **dict.fromkeys(("redirects", "tee"), STREAMS),
    **dict.fromkeys("rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr local_addr log_dir".split(), TEXT),
}
LAUNCHER = "PLAINROLL_LAUNCHER"  # in the environment of a rank: the process that has started it
CORES = "PLAINROLL_CORES"  # in the environment: cores of each rank of this machine, such as 0,1;2,3 (mux.py)
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # in the environment: seconds between SIGTERM and SIGKILL to ranks
TORCHS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT  # signals that its launcher handles
SIGNALLED = 128  # a shell's exit code of a process that a signal has ended, less the signal's number


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return `--ranks` and torchrun's options, and the rest of the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("ranks", "nproc_per_node", *OPTIONS):
        parser.add_argument(*(f"--{spelling}" for spelling in sorted({name, name.replace("_", "-")})), dest=name)
    flags, rest = parser.parse_known_args(argv)
    if flags.ranks is None:
        flags.ranks = flags.nproc_per_node
    return flags, rest


def given(flags: argparse.Namespace) -> list[str]:
    """Return the options that were given, as torchrun's arguments."""
    return [f"--{name}={value}" for name in OPTIONS if (value := getattr(flags, name)) is not None]


def is_wanted(flags: argparse.Namespace) -> bool:
    """Return whether this process is to start ranks. Raises ConfigError on a wrong value."""
    for name, (pattern, meaning) in {"nproc_per_node": RANKS, "ranks": RANKS, **OPTIONS}.items():
        value = getattr(flags, name)
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise ConfigError(f"--{name}={value} is not valid; write {meaning}")
    low, _, high = (flags.nnodes or "").partition(":")
    if high and int(low) > int(high):
        raise ConfigError(f"--nnodes={flags.nnodes} is not a range; write the smaller number first, as 2:4")
    asked = [*([f"--ranks={flags.ranks}"] if flags.ranks else []), *given(flags)]
    if asked and "RANK" in os.environ:
        raise ConfigError(f"{asked[0]}: torchrun has started this rank already; give the option to torchrun")
    return asked not in ([], ["--ranks=1"])


def pretend(flags: argparse.Namespace) -> int:
    """Give this process the environment of a rank of `launch`, for checks; return the number of ranks."""
    ranks = int(flags.ranks or 1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    divide_cores(ranks)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return num_ranks(flags)


def num_ranks(flags: argparse.Namespace) -> int:
    """Return the ranks of `launch` on all machines; where `--nnodes` is a range, the largest number."""
    return int(flags.ranks or 1) * int((flags.nnodes or "1").rpartition(":")[2])


def divide_cores(ranks: int) -> None:
    """Give each rank its part of the cores, unless OMP_NUM_THREADS is set; torchrun alone gives each rank one core.

    Their threads share cores with other processes, too.
    """
    before_torch()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(torch.get_num_threads() // ranks, 1)))


def settle() -> None:
    """Be the rank that a launcher wants: on the cores that it gives, and no longer than itself. (Linux)"""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.environ.pop(LAUNCHER, str(parent := os.getppid())) != str(parent):
            sys.exit("error: the launcher has ended before its rank began")  # and so sends no signal
        if cores := os.environ.get(CORES):
            own = cores.split(";")[int(os.environ["LOCAL_RANK"])]
            os.sched_setaffinity(0, map(int, own.split(",")))  # for threads and processes that start later, too


def launch(script: str, flags: argparse.Namespace, arguments: list[str]) -> int:
    """Run `script` on the ranks that `flags` asks for, to their end; return the exit code.

    A failure prints one line: the rank's, or ours if a signal has ended the rank.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    ranks, before, disabled = int(flags.ranks or 1), dict(os.environ), logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in TORCHS}  # torch sets its own
    divide_cores(ranks)
    # A signal waits for the step and its checkpoint. An option of this name came with torch 2.12.
    os.environ.setdefault(SHUTDOWN, "600")
    os.environ[LAUNCHER] = str(os.getpid())
    # With restarts, only torch's lines tell why a rank was started again.
    logging.disable(logging.WARNING if int(flags.max_restarts or 0) else logging.ERROR)
    try:
        options = given(flags)
        if not (flags.log_dir or flags.redirects or flags.tee):
            options.append(f"--log_dir={os.devnull}")  # else torchrun leaves an empty folder in /tmp
        main([f"--nproc_per_node={ranks}", *options, script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"error: {failure.signal_name()} ended rank {rank} (process {failure.pid})", file=sys.stderr)
        return SIGNALLED - failure.exitcode
    except SignalException as error:
        code = SIGNALLED + error.sigval
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # a third signal leaves torch's threads without an end: Python would wait for them
        return code
    finally:  # a script may go on after its run
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(before)
    return 0
