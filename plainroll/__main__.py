"""The scripts of the repository from anywhere: `python -m plainroll train --ranks=2 ...`, evaluate, serve, mux ..."""

import os
import sys

from plainroll import ROOT

SCRIPTS = {name: f"{name}.py" for name in ("train", "serve", "mux", "simulate", "profiler", "environments")}
SCRIPTS["evaluate"] = "process/evaluate.py"

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or [""]
    if name not in SCRIPTS:
        print(f"usage: python -m plainroll NAME [--help] ...\nNAME is one of: {', '.join(SCRIPTS)}", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(ROOT / SCRIPTS[name]), *arguments])
