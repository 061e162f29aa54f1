"""Rows of a table, sections that report them from processes of their own, and clocks: what gpu.py is made of."""

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from parallel import own_device

ROOT = Path(__file__).resolve().parent.parent
GRACE = 20  # seconds over its time after which a section is killed


@dataclass(frozen=True)
class Row:
    case: str
    result: str
    state: str = ""  # ok, FAIL, below goal, skipped; empty: nothing was asked
    goal: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


class Section:
    """What a section works with: its device, its time, what earlier ones measured, and `row`, which reports at once."""

    def __init__(self, device: str, seconds: float, known: dict[str, Any], send: Callable[[Row], None]):
        self.device, self.known, self.send = torch.device(device), known, send
        self.on_gpu, self.end = device == "cuda", time.perf_counter() + seconds

    def row(self, case: str, result: str, good: bool | None = None, goal: str = "", **metrics: Any) -> None:
        """Report; `good` None asks for nothing, False fails the run."""
        self.send(Row(case, result, {None: "", True: "ok", False: "FAIL"}[good], goal, metrics))

    def aim(self, case: str, result: str, reached: bool, goal: str, **metrics: Any) -> None:
        """Report against a goal that fails nothing."""
        self.send(Row(case, result, "ok" if reached else "below goal", goal, metrics))

    def skip(self, case: str, why: str) -> None:
        self.send(Row(case, why, "skipped"))

    def in_time(self, cases: Iterable[Any]) -> Iterator[Any]:
        cases = list(cases)
        for i, case in enumerate(cases):
            if time.perf_counter() > self.end:
                return self.skip("the rest", f"the section's time is used up: {len(cases) - i} of {len(cases)} left")
            yield case

    @contextmanager
    def guard(self, case: str) -> Iterator[None]:
        """Turn an exception into a row."""
        try:
            yield
        except subprocess.TimeoutExpired as error:
            self.skip(case, f"not done after {error.timeout:.0f} s; give it more by --only")
        except Exception as error:
            traceback.print_exception(error)  # to stderr
            self.row(case, describe(error), False)


def describe(error: BaseException) -> str:
    """Return an error in a line, with our own place nearest to it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(ROOT) and "site-packages" not in f.filename]
    at, lines = (ours or frames)[-1], (str(error).strip() or "-").splitlines()
    text = lines[-1] if lines[0].startswith("at ") else lines[0]  # Triton says the place first, the reason last
    return f"{type(error).__name__}: {text[:200]} ({Path(at.filename).name}:{at.lineno})"


FORK = multiprocessing.get_context("fork")  # torch is imported once; CUDA starts in the children only


def run_section(
    function: Callable[[Section], None], device: str, seconds: float, known: dict[str, Any], grace: float = GRACE
) -> list[Row]:
    """Run a section in a process of its own; return its rows, whatever becomes of it.

    `known`: metrics of earlier sections. After `seconds` it should end by itself, `grace` later it is killed.
    """
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(function, device, seconds, known, send))
    process.start()
    assert process.pid
    send.close()
    rows, end = [], time.perf_counter() + seconds + grace
    try:
        while receive.poll(max(0.0, end - time.perf_counter())):
            rows.append(receive.recv())
    except EOFError:  # it has ended
        process.join()
        if process.exitcode:
            rows.append(Row("process", f"ended with exit code {process.exitcode}", "FAIL"))
        return rows
    os.killpg(process.pid, signal.SIGKILL)  # its own children too
    process.join()
    return [*rows, Row("time", f"killed after {seconds + grace:.0f} s", "FAIL")]


def _child(function: Callable[[Section], None], device: str, seconds: float, known: dict, send: Any) -> None:
    os.setsid()
    os.dup2(2, 1)  # stdout is the table's
    section = Section(device, seconds, known, send.send)
    with section.guard("section"):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as `parallel.start` does
        own_device(device)
        function(section)


def print_table(results: list[tuple[str, Row]], seconds: float) -> None:
    metrics = {key: value for _, row in results for key, value in row.metrics.items()}
    print(f"# {metrics.get('device', 'no device')}\n")
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers"))
    packages += f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    print(f"`bash benchmarks/gpu.sh`: {packages}, Python {platform.python_version()}; {when} UTC, {seconds:.0f} s\n")
    print("| section | case | result | goal | |\n|---|---|---|---|---|")
    for name, row in results:
        cells = (name, row.case, row.result, row.goal, row.state)
        print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    failed = sum(row.state == "FAIL" for _, row in results)
    print("\n" + json.dumps({"name": "gpu", "failed": failed, "seconds": round(seconds, 1), **metrics}))


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


# ---- clocks -----------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: torch.device, captured: bool = False, turns: int = 20) -> float:
    """Return the best seconds of one call of `turns`; `captured`: inside a CUDA graph, as the engine calls it."""
    call()
    inner = 1
    if captured and device.type == "cuda":
        inner, graph = 10, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        call = graph.replay
    times: list[float] = []
    end = time.perf_counter() + 0.2
    while len(times) < turns and (len(times) < 3 or time.perf_counter() < end):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1000)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return min(times) / inner


def measure_bandwidth(device: torch.device) -> float:
    """Return bytes per second of memory: the better of a copy (read and write) and a sum (read)."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, device=device)  # far beyond any cache
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
    return max(copied, source.nbytes / seconds_of(source.sum, device))
