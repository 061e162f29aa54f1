"""Agent code as an environment: `--data.env=examples/own_agent.py:retry --data.task=env`, beside own.toml.

`solve` is what any program does that talks to a model by the `openai` package. It becomes an environment in one line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.agents import from_agent


def solve(row, seed, address):
    from openai import OpenAI  # pip install openai

    client, text = OpenAI(base_url=address, api_key="none"), row["prompt"]
    for tries in range(3):
        answer = client.completions.create(model="policy", prompt=text).choices[0].text
        if answer.rpartition("=")[2] == row["answer"]:
            return 1 - tries / 4
        text += answer + "\nWrong, try again: "
    return 0.0


retry = from_agent(solve)
