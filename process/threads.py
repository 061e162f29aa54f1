"""How OpenMP's threads wait for each other. Without torch: libgomp reads its settings when torch loads it."""

import os

SPINS = "10000"  # looks at a barrier before a thread sleeps: a tenth of a millisecond instead of some
GIVEN = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"


def spin_briefly() -> None:
    """Have threads that wait give up their core soon, unless the user has said how they wait.

    Beside another process that wants a core, a thread that spins keeps the late one waiting, and a decode step takes
    far longer. Alone, only models whose operations take a few microseconds lose a little. benchmarks/waiting.py
    measures both.
    """
    if not any(name in os.environ for name in GIVEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS
