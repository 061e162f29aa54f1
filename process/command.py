"""How a script's command line ends. Without torch: the simulator has one, too."""

import os
import select
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn

CLOSED = 141  # a shell's exit code of a process that SIGPIPE has ended


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command line and exit with its code; without a word where the reader of its output has ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a console may lack letters that texts have
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not output_is_closed():
            raise
        code = CLOSED
    sys.exit(code)


def output_is_closed() -> bool:
    """Return whether nobody reads what this process prints; if so, print the rest to nowhere."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # a notebook's
        return False
    look = select.poll()
    look.register(output, 0)  # a pipe without a reader is an error, which is always told
    if is_closed := bool(look.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # the interpreter flushes once more at the end
    return is_closed
