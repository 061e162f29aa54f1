"""`train.py --ranks=N` without torchrun: ranks are forked from one process that has imported everything, in a third of
the time. For drills that start jobs often (benchmarks/mux_faults.py); arguments are those of train.py.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # what a run would import itself: for its optimizer, its tokenizer
import torch.distributed as dist
import transformers.models.auto.tokenization_auto  # noqa: F401

import train
from process import launcher


def rank_of(rank: int, size: int, port: int, arguments: list[str]) -> int:
    """Fork a rank; return its process."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RUN_ID"] = "forked"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = 1
    try:
        code = train.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(argv: list[str]) -> int:
    """Run all ranks to their ends; return the exit code of the first that fails."""
    flags, arguments = launcher.parse(argv)
    size, code = int(flags.ranks), 0
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pids = {rank_of(rank, size, store.port, arguments): rank for rank in range(size)}

    def end_all(*_: object) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_all)
    while pids:
        pid, status = os.wait()
        ended, rank = os.waitstatus_to_exitcode(status), pids.pop(pid)
        if ended and not code:
            if ended < 0:
                print(f"error: {signal.Signals(-ended).name} ended rank {rank} (process {pid})", file=sys.stderr)
            code = launcher.SIGNALLED - ended if ended < 0 else ended
            end_all()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
