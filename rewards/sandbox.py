"""Run an untrusted Python program against a test case, and return whether it passes.

    case {"stdin": text, "stdout": text}    the program reads stdin; what it prints must be the expected lines
    case {"test": "assert add(2, 3) == 5"}  the program defines functions; the test must run without an error

The verdict is always made outside of the program's box: expected outputs never enter it, and assertions run in a second
box that sees the program's results as plain data only. Programs have the standard library, an empty folder and no
environment variables. Linux only; standard library only.
"""

import contextlib
import functools
import json
import marshal
import math
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO

from rewards import box, leftovers, walls

SETUP_SECONDS = 20.0  # for the box itself, before the program starts: a machine may be very busy
OVERHEAD_SECONDS = 2 * SETUP_SECONDS + 20.0  # at most, beside the program's own time: two boxes made and removed
TICK = 0.1  # seconds between looks at memory and number of processes
WAY_OUT = "allow user namespaces or install bubblewrap"
CLEANING_SECONDS = 1.0  # longest wait for a keeper to remove files; then it goes on beside the next programs
MOST_CLEANING = 16  # keepers that remove files at a time
FOLDER_BYTES = 8192  # an entry may take so much on disk, beside its content
KEEPER_DIED = "the program ended its keeper"
# A program starts like a script, its folder first on the path. `site` would define `exit` and `quit`.
STARTER = """import builtins, posix, sys
builtins.exit = builtins.quit = sys.exit
sys.setrecursionlimit(sys.getrecursionlimit() + 2)  # for the frames of this
sys.path[0], sys.argv = posix.getcwd(), ["program.py"]
__file__ = sys.path[0] + "/program.py"
with open(__file__, "rb") as file:
    code = compile(file.read(), __file__, "exec")
del builtins, posix, sys, file
exec(globals().pop("code"))
"""
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Imported, because Python compiles a script at each start.
KEEPER = "import sys; sys.path.append({home!r}); from rewards import box; box.keep_box({spec})"
CLEANER = (
    "import sys; sys.path.append({home!r}); from rewards import leftovers; leftovers.clean_after_the_killed({box!r})"
)


def is_keeper(pid: int) -> bool:
    """Whether a process is the keeper of a box, which ends all processes below it when its caller dies."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(code.rpartition(" ")[2].partition("{")[0].encode() in command for code in (KEEPER, CLEANER))


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 10.0  # wall time; CPU time of each process: as much, rounded up, and a second more
    memory_bytes: int = 512 * 2**20  # address space of each process, resident memory of all
    processes: int = 16  # processes and threads
    file_bytes: int = 16 * 2**20  # of all files
    output_bytes: int = 2**20


@dataclass(frozen=True)
class Outcome:
    """The result of one program on one case."""

    passed: bool
    seconds: float  # wall time of the program alone
    cause: str = ""  # why it did not pass
    timed_out: bool = False


class SandboxError(RuntimeError):
    """No program can be run here; the text says why and how to change that."""


@dataclass(frozen=True)
class Isolation:
    """The way to keep programs apart from the rest of the machine, and the interpreter that runs them."""

    kind: str  # "namespaces", "bubblewrap" or "limits"
    python: str
    prefix: str  # of the interpreter

    def __str__(self) -> str:
        if self.kind != "limits":
            return f"{self.kind}: own files, processes and network, and resource limits"
        version, is_root = walls.landlock_version(), os.geteuid() == 0
        text = f"resource limits and {'a throw-away user' if is_root else 'no user of their own'}; "
        if version and is_root:
            return f"{text}Landlock keeps them to their own files"
        if version:
            ended = "" if version >= walls.SEES_SIGNALS else " and END YOUR PROCESSES"
            text += "Landlock keeps them from reading and writing your files, but "
            return f"{text}programs can CHANGE MODES AND TIMES OF YOUR FILES{ended}; {WAY_OUT}"
        return (
            f"{text}programs can reach {'world-readable files' if is_root else 'YOUR FILES AND PROCESSES'}; {WAY_OUT}"
        )


ISOLATIONS = ("namespaces", "bubblewrap", "limits")


@functools.cache
def isolation() -> Isolation:
    """Return the strongest isolation that works here, found by running a program in it. Raises SandboxError."""
    causes = []
    for kind in ISOLATIONS:
        found, cause = try_isolation(kind)
        if found:
            return found
        causes.append(f"{kind}: {cause}")
    raise SandboxError(f"cannot run programs here ({'; '.join(causes)}); {WAY_OUT}")


def try_isolation(kind: str) -> tuple[Isolation | None, str]:
    """Return an isolation of this kind that runs programs, or None and the reason."""
    if sys.platform != "linux":
        return None, "the sandbox needs Linux"
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        return None, "not installed"
    cause = ""
    own, system = os.path.realpath(sys.executable), "/usr/bin/python3"
    # A throw-away user may not be allowed to read an interpreter that lies in somebody's home.
    for python, prefix in ((own, sys.base_prefix), (os.path.realpath(system), "/usr")):
        candidate = Isolation(kind, python, prefix)
        try:
            outcome = run("print(input())", {"stdin": "ready", "stdout": "ready"}, Limits(), candidate)
        except SandboxError as error:
            if isinstance(error.__cause__, OSError):
                raise  # of no kind of box, and perhaps not for long
            cause = cause or str(error)
            continue
        if outcome.passed:
            return candidate, ""
        cause = cause or outcome.cause
    return None, cause


def read_cases(answer: str) -> list[dict[str, str]]:
    """Return the test cases of a data row's answer, a JSON list. Raises ValueError."""
    try:
        cases = json.loads(answer)
    except RecursionError:
        raise ValueError("the answer of a program is a JSON list of test cases, not lists in lists") from None
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"the answer of a program is a JSON list of test cases, not {answer[:80]!r}")
    for case in cases:
        _check_case(case)
    return cases


def _check_case(case: dict[str, str]) -> None:
    keys = set(case) if isinstance(case, dict) else set()
    if keys not in ({"test"}, {"stdin", "stdout"}) or not all(isinstance(value, str) for value in case.values()):
        raise ValueError(f'a test case has {{"stdin", "stdout"}} or {{"test"}}, all text, not {json.dumps(case)[:80]}')


@contextlib.contextmanager
def _machine() -> Iterator[None]:
    """Raise SandboxError where the machine has no room, no process or no free descriptor."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"cannot start a program: {error}") from error


def run(program: str, case: dict[str, str], limits: Limits, how: Isolation | None = None) -> Outcome:
    """Run `program` on one case. Raises ValueError for an invalid case, SandboxError if no box can be made."""
    how = how or isolation()
    _check_case(case)
    if "test" in case:
        with _machine(), contextlib.ExitStack() as stack:
            return _run_test(program, case["test"], limits, how, stack)
    outcome, output = execute(program, case["stdin"], limits, how)
    if outcome.passed and _lines(output) != _lines(case["stdout"].encode(errors="surrogatepass")):
        return replace(outcome, passed=False, cause="wrong output")
    return outcome


def execute(program: str, stdin: str, limits: Limits, how: Isolation | None = None) -> tuple[Outcome, bytes]:
    """Run `program`; return whether it ended well, and what it printed. Raises SandboxError if no box can be made."""
    how = how or isolation()
    with _machine(), _Box(how, limits, ["-c", STARTER], {"program.py": program}, stdin) as main:
        outcome = _watch(main, [], limits)
    return outcome, bytes(main.output[: limits.output_bytes])


def _run_test(program: str, test: str, limits: Limits, how: Isolation, stack: contextlib.ExitStack) -> Outcome:
    with open(box.__file__, encoding="utf-8") as file:
        inside = file.read()
    channels = [*os.pipe()]
    try:
        channels += os.pipe()
        asked, answers, asks, answered = channels  # read end, write end; the program writes `answers`
        serving = ["box.py", "serve", str(asks), str(answers)]
        testing = ["box.py", "test", str(asked), str(answered)]
        files = {"box.py": inside, "program.py": program}
        served = stack.enter_context(_Box(how, limits, serving, files, "", (asks, answers)))
        files = {"box.py": inside, "test.py": test}
        tester = stack.enter_context(_Box(how, limits, testing, files, "", (asked, answered)))
    finally:
        for channel in channels:
            os.close(channel)
    outcome = _watch(tester, [served], limits)
    if not outcome.passed and served.errors and not outcome.timed_out:
        return replace(outcome, cause=f"{outcome.cause}; the program: {served.last_error}")
    return outcome


def _lines(text: bytes) -> list[bytes]:
    """Return lines without trailing blanks and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


# ---- one box ---------------------------------------------------------------------------------------------------


class _Box:
    """A keeper and its program, from the start of the `with` block to the end of all their processes and files."""

    def __init__(
        self,
        how: Isolation,
        limits: Limits,
        arguments: list[str],
        files: dict[str, str],
        stdin: str,
        channels: tuple[int, ...] = (),
    ):
        self.output, self.errors, self.reports = bytearray(), bytearray(), bytearray()
        _wait_for_cleaners()
        with contextlib.ExitStack() as started, contextlib.ExitStack() as failed:
            self.folder = tempfile.mkdtemp(prefix="plainroll-box-")
            failed.callback(os.rmdir, self.folder)
            self.report, report = os.pipe()
            failed.callback(os.close, self.report)
            started.callback(os.close, report)
            spec, text = (self._memory(name, started) for name in ("spec", "stdin"))
            description = {
                "isolation": how.kind,
                "prefix": how.prefix,
                "caller": os.getpid(),
                "report": report,
                "channels": channels,
                "folder": self.folder,
                "files": files,
                "command": _command(how, self.folder, arguments),
                "limits": _rlimits(limits),
                "most_files": box.MOST_FILES,
                "system_calls": _system_calls(),
            }
            keeper = KEEPER.format(home=HOME, spec=spec)
            for handle, content in (spec, marshal.dumps(description)), (text, stdin.encode(errors="surrogatepass")):
                with os.fdopen(os.dup(handle), "wb") as file:
                    file.write(content)
                os.lseek(handle, 0, os.SEEK_SET)
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", keeper],
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                pass_fds=(spec, report, *channels),
                start_new_session=True,
            )
            failed.pop_all()

    @staticmethod
    def _memory(name: str, stack: contextlib.ExitStack) -> int:
        """Return an open file in memory, closed with a stack."""
        stack.callback(os.close, handle := os.memfd_create(name))
        return handle

    def __enter__(self) -> "_Box":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        if not self._wait_for_end(5.0):  # a program of the same user has stopped the keeper: end both from here
            for pid in leftovers.descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
        for stream in self.streams:
            stream.close()
        os.close(self.report)
        _let_clean(self.process)
        if self.process.returncode:  # the keeper was killed
            code = CLEANER.format(home=HOME, box=self.folder)
            _let_clean(subprocess.Popen([sys.executable, "-I", "-S", "-B", "-c", code], env={}, start_new_session=True))

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """The program's stdout and stderr."""
        assert self.process.stdout and self.process.stderr, "both are pipes"
        return self.process.stdout, self.process.stderr

    def _wait_for_end(self, seconds: float) -> bool:
        """Wait until the keeper has ended every process and closes its report."""
        deadline, poll = time.monotonic() + seconds, select.poll()
        poll.register(self.report)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000) and not os.read(self.report, 65536):
                return True
        return False

    def said(self, word: str) -> str:
        """Return the keeper's report under the word "start", "end" or "error"; "" if there is none."""
        lines = self.reports.decode(errors="replace").splitlines()
        return next((line.removeprefix(word).strip() for line in lines if line.startswith(word)), "")

    @property
    def last_error(self) -> str:
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""


_cleaning: list[subprocess.Popen] = []  # keepers that remove files


def _let_clean(keeper: subprocess.Popen) -> None:
    """Wait at most CLEANING_SECONDS for a keeper whose program has ended."""
    try:
        keeper.wait(CLEANING_SECONDS)
    except subprocess.TimeoutExpired:
        _cleaning.append(keeper)


def _wait_for_cleaners() -> None:
    """Wait while too many keepers remove files. Raises SandboxError if that lasts."""
    deadline = time.monotonic() + SETUP_SECONDS
    while True:
        _cleaning[:] = [keeper for keeper in _cleaning if keeper.poll() is None]
        if len(_cleaning) < MOST_CLEANING:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"the files of {len(_cleaning)} programs are still being removed; use a faster disk")
        time.sleep(TICK)


def _command(how: Isolation, folder: str, arguments: list[str]) -> list[str]:
    python = [how.python, "-s", "-S", "-B", "-X", "utf8", *arguments]  # not -I, which ignores box.ENVIRONMENT
    if how.kind != "bubblewrap":
        return python
    options = "--unshare-all --die-with-parent --new-session --cap-drop ALL --chdir /tmp".split()
    options += ["--bind", box.home(folder), "/tmp"]
    for path in box.DEVICES:
        options += ["--dev-bind", path, path]
    for path in box.box_paths(how.prefix):
        options += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    options += ["--remount-ro", "/"]  # it is in memory, without a limit
    return [str(shutil.which("bwrap")), *options, "--", *python]


@functools.cache
def _system_calls() -> bytes:
    """Return the filter of system calls. Raises SandboxError on a machine without a filter."""
    try:
        return walls.system_calls()
    except OSError as error:
        raise SandboxError(error.strerror) from None


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "CPU": math.ceil(limits.seconds) + 1,
        "AS": limits.memory_bytes,
        "FSIZE": limits.file_bytes,
        "NPROC": limits.processes + 4,  # bubblewrap and the first process of the namespaces may count too
        "NOFILE": 64,
        "SIGPENDING": 64,  # also limits POSIX timers, whose memory no process maps
        "CORE": 0,
    }


def _watch(main: _Box, others: list[_Box], limits: Limits) -> Outcome:
    """Read the boxes' output until `main` has ended or a limit is passed."""
    boxes = [main, *others]
    deadline, next_tick = time.monotonic() + SETUP_SECONDS, time.monotonic() + TICK
    start, has_ended = None, False
    with selectors.DefaultSelector() as selector:
        for each in boxes:
            handles = (*(stream.fileno() for stream in each.streams), each.report)
            for handle, kept in zip(handles, (each.output, each.errors, each.reports)):
                selector.register(handle, selectors.EVENT_READ, (each, kept))
        while any(key.data[0] is main for key in selector.get_map().values()):
            now = time.monotonic()
            for key, _ in selector.select(max(min(deadline, next_tick) - now, 0.0)):
                chunk = os.read(key.fd, 65536)
                key.data[1].extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if start is None and (started := main.said("start")):
                start = float(started)
                deadline = start + limits.seconds
            if not has_ended and main.said("end"):  # the verdict stands; ending its other processes may take long
                has_ended, deadline, next_tick = True, now + SETUP_SECONDS, math.inf
            seconds = now - (start or now)
            if now >= deadline:
                if has_ended:
                    break
                if start is None and not main.said("error"):
                    raise SandboxError(f"the box was not ready within {SETUP_SECONDS:g} s")
                return Outcome(False, seconds, f"did not end within {limits.seconds:g} s", timed_out=True)
            if any(len(each.output) + len(each.errors) > limits.output_bytes for each in boxes):
                return Outcome(False, seconds, f"wrote over {limits.output_bytes} bytes")
            if now >= next_tick:
                next_tick = now + TICK
                if cause := _over(boxes, limits):
                    return Outcome(False, seconds, cause)
    return _outcome(main, others, time.monotonic() - (start or time.monotonic()))


def _over(boxes: list[_Box], limits: Limits) -> str:
    """Return the limit of all processes together that the programs have passed, or ""."""
    if any(each.said("start") and each.process.poll() for each in boxes):  # a daemon may hold its pipes open
        return KEEPER_DIED
    used = [resident for each in boxes for resident in leftovers.descendants(each.process.pid).values()]
    if sum(used) > limits.memory_bytes * len(boxes):
        return f"used over {limits.memory_bytes} bytes of memory"
    if len(used) > (limits.processes + 4) * len(boxes):
        return f"had over {limits.processes} processes"
    for each in boxes:  # in namespaces the folder is empty: files lie in memory of a fixed size
        count, size = leftovers.measure_tree(each.folder, box.MOST_FILES)
        if count > box.MOST_FILES or size > limits.file_bytes + FOLDER_BYTES * count:
            return f"made over {box.MOST_FILES} files, or over {limits.file_bytes} bytes of them, or hid some"
    return ""


def _outcome(main: _Box, others: list[_Box], seconds: float) -> Outcome:
    for each in (main, *others):
        if error := each.said("error"):
            raise SandboxError(f"cannot start a program: {error}")
    start, end = main.said("start"), main.said("end")
    if not start:  # the keeper reports it before any code of the program runs
        raise SandboxError(f"cannot start a program: {main.last_error or 'its keeper died'}")
    if not end:
        return Outcome(False, seconds, KEEPER_DIED)
    status, ended = end.split()
    seconds = float(ended) - float(start)
    code = os.waitstatus_to_exitcode(int(status))
    if code == 0:
        return Outcome(True, seconds)
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome(False, seconds, f"{how}: {main.last_error}" if main.errors else how)
