"""A run from Python: `pip install -e .` once, then `python examples/library.py`. A few steps on two CPU cores."""

import sys

from plainroll.library import read_records, run

SETTINGS = {
    "run": {"dir": "runs/library", "steps": 5, "eval_every": 5},
    "data": {"train": "hailstone", "eval_prompts": 32},
    "warm_start.steps": 300,  # of a small model, made on the first start
    "scheduler": {"num_prompts": 8, "num_responses": 4},
    "rollout": {"max_prompt_tokens": 64, "max_response_tokens": 128},
}


def stop_when_bad(job, record):
    """A callback: it gets the job and the record of the step, on every rank. What it raises ends the run."""
    if record["step"] > 3 and record["reward"] == 0:
        raise RuntimeError("no reward after three steps")


if __name__ == "__main__":
    code = run(SETTINGS, callbacks=[stop_when_bad], ranks=2)
    if code == 0:
        rewards = [record["reward"] for record in read_records("runs/library/steps.jsonl") if record["step"]]
        print("rewards by step:", *(f"{reward:.2f}" for reward in rewards))
    sys.exit(code)
