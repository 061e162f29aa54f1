"""An environment behind an address: each turn is a POST of {"id", "row", "seed", "actions"} as JSON.

`actions` are the texts of all turns so far; `id` names the episode. The reply is {"text": what the model reads next} or
{"end": true}, each with {"reward": number} for the newest turn if it has one. So a service need not remember anything.
One that keeps the state of an `id` gets one action more in each request, but for a request that comes again because its
reply was lost. Nobody tells it of episodes that are given up.
"""

import json
from collections.abc import Callable
from uuid import uuid4

from core import Environment, Reply, Turns


def service(address: str, ask: Callable[[str, bytes], bytes]) -> Environment:
    """Return the environment of a service. `ask(address, body)` returns the body of its reply."""

    def environment(row: dict, seed: int) -> Turns:
        id, actions = str(uuid4()), list[str]()
        while True:
            said = ask(address, json.dumps({"id": id, "row": row, "seed": seed, "actions": actions}).encode())
            reply = _read(said)
            if reply.get("end") is True:
                return reply.get("reward")
            reward = reply.get("reward")
            actions.append((yield Reply(reply["text"], 0.0 if reward is None else reward)))

    return environment


def _read(said: bytes) -> dict:
    """Return the object in a reply. Raises ValueError if it has neither text nor end."""
    try:
        reply = json.loads(said)
        if isinstance(reply, dict) and ("text" in reply or reply.get("end") is True):
            return reply
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"the service replied {said[:80]!r}, not an object with a text, or with end = true")
