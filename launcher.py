"""Starts the ranks of this machine: torchrun, with the cores divided among them and without its tracebacks."""

import argparse
import logging
import os
import sys

import torch

from config import ConfigError

OPTIONS = (  # torchrun's own
    "nnodes node_rank max_restarts monitor_interval shutdown_timeout rdzv_backend rdzv_endpoint rdzv_id rdzv_conf "
    "master_addr master_port local_addr log_dir redirects tee"
).split()
SIGNALLED = 128  # a shell's exit code of what a signal ended, less the signal's number


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return `--ranks` and torchrun's options, and everything else of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("ranks", "nproc_per_node"), *((name,) for name in OPTIONS)):
        spellings = {spelling: None for name in names for spelling in (name, name.replace("_", "-"))}
        parser.add_argument(*(f"--{spelling}" for spelling in spellings))
    return parser.parse_known_args(argv)


def given(flags: argparse.Namespace) -> list[str]:
    """Return torchrun's options of a command line, as torchrun takes them."""
    return [f"--{name}={value}" for name in OPTIONS if (value := getattr(flags, name)) is not None]


def is_wanted(flags: argparse.Namespace) -> bool:
    """Whether the command line asks for ranks that this process is to start."""
    asked = [*([f"--ranks={flags.ranks}"] if flags.ranks else []), *given(flags)]
    if asked and "RANK" in os.environ:
        raise ConfigError(f"{asked[0]}: this is a rank that torchrun has started; give it to torchrun")
    return asked not in ([], ["--ranks=1"])


def ranks_here(flags: argparse.Namespace) -> int:
    text = flags.ranks or "1"
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ConfigError(f"--ranks={text} is no number of 1 to 1024")
    return int(text)


def pretend(flags: argparse.Namespace) -> int:
    """Give this process what a rank of `launch` would see, for checks; return how many ranks there would be.

    Where `--nnodes` is a range, as many as there can be.
    """
    ranks, nodes = ranks_here(flags), (flags.nnodes or "1").rpartition(":")[2]
    if not nodes.isdecimal() or int(nodes) < 1:
        raise ConfigError(f"--nnodes={flags.nnodes} is no number of machines, such as 4, and no range, such as 2:4")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    divide_cores(ranks)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return ranks * int(nodes)


def divide_cores(ranks: int) -> None:
    """Give each rank its part of the cores, unless the user has said how many; torchrun alone gives each one core."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(torch.get_num_threads() // ranks, 1)))


def launch(script: str, flags: argparse.Namespace, arguments: list[str]) -> int:
    """Run `script` on the ranks that `flags` asks for, to their end; return the exit code.

    Of a failure there is one line: the rank's, or ours when a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    ranks = ranks_here(flags)
    divide_cores(ranks)
    options = ["--shutdown-timeout=600", *given(flags)]  # a signal waits for the step and its checkpoint
    # With restarts, torch's lines are all that tells why a rank was started again.
    logging.disable(logging.WARNING if int(flags.max_restarts or 0) else logging.ERROR)
    try:
        main([f"--nproc_per_node={ranks}", *options, script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"error: {failure.signal_name()} ended rank {rank} (process {failure.pid})", file=sys.stderr)
        return SIGNALLED - failure.exitcode
    except SignalException as error:
        return SIGNALLED + error.sigval
    return 0
