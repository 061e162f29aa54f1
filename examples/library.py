"""A run from Python: `pip install -e .` once, then `python examples/library.py`. A few steps on two CPU cores.

`python examples/library.py by-hand`: the steps in a loop of your own, on one core.
"""

import sys

from plainroll.library import open_job, read_records, run, take_step

SETTINGS = {
    "run.dir": "runs/library",
    "run": {"steps": 5, "eval_every": 5},
    "data": {"train": "hailstone", "eval_prompts": 32},
    "warm_start.steps": 300,  # of a small model, made on the first start
    "scheduler": {"num_prompts": 8, "num_responses": 4},
    "rollout": {"max_prompt_tokens": 64, "max_response_tokens": 128},
}


def stop_when_bad(job, record):
    """A callback: it gets the job and the record of the step, on every rank. What it raises ends the run."""
    if record["step"] > 3 and record["reward"] == 0:
        raise RuntimeError("no reward after three steps")


def step_by_hand():
    with open_job(SETTINGS | {"run.dir": "runs/by_hand"}) as job:
        while job.step < job.config.run.steps:
            record = take_step(job)
            job.recorder.write(record)  # into steps.jsonl
            print(f"step {record['step']}: reward {record['reward']:.2f}")
        job.save(waits=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["by-hand"]:
        sys.exit(step_by_hand())
    code = run(SETTINGS, callbacks=[stop_when_bad], ranks=2)
    if code == 0:
        rewards = [record["reward"] for record in read_records("runs/library/steps.jsonl") if record["step"]]
        print("rewards by step:", *(f"{reward:.2f}" for reward in rewards))
    sys.exit(code)
