"""How OpenMP's threads wait for each other, and in which pages torch's memory lies. Without torch, which reads both."""

import os

SPINS = "300"  # looks at a barrier before a thread sleeps: some microseconds instead of milliseconds
GIVEN = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def before_torch() -> None:
    """Set what torch and its OpenMP read when they load, unless the user has.

    Threads that wait give up their core soon: beside another process that wants a core, a thread that spins keeps the
    late one waiting, and a step takes far longer. Alone, operations of a few microseconds lose, so decode steps of
    little work are one thread's (`engine.cpu.threads_for`). benchmarks/waiting.py measures the ways to wait.

    Tensors of 2 MiB and more lie in huge pages where Linux gives them on request: a CPU that reads all weights at each
    step then looks up fewer addresses.
    """
    if not any(name in os.environ for name in GIVEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    os.environ.setdefault(HUGE_PAGES, "1")
