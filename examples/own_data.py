"""Data of your own, one JSON object a line: `python examples/own_data.py > runs/own.jsonl` (see own.toml)."""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks import TASKS

if __name__ == "__main__":
    task = TASKS["hailstone"]
    for n in random.Random(1).sample(list(task.numbers()), 2000):
        print(json.dumps({"prompt": task.prompt(n), "answer": task.answer(n), "number": n}))
