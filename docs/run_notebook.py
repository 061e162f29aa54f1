"""Runs a notebook's code cells in order, without Jupyter: `python docs/run_notebook.py docs/first_hour.ipynb`."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def run(path: Path, **settings: Any) -> dict[str, Any]:
    """Return all names after the last cell. `settings` replace names that the first cell has set. Writes no outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            print(f"\n{source}\n")
            continue
        start = time.perf_counter()
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
        names, settings = names | settings, {}
        print(f"[cell {number}: {time.perf_counter() - start:.1f} s]", flush=True)
    return names


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    run(Path(sys.argv[1]).resolve())
