"""Stands for train.py in tests of mux.py: phases without work, by the real client. Its job's name says how it ends."""

import argparse
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from process.permits import Client, GroupError


def play(name: str, steps: int, first: int, folder: Path, clients: dict[str, Client], settings: Path) -> None:
    clients["train"].request("start")
    clients["train"].release()
    for step in range(first, steps + 1):
        if "part" in name:
            decode_in_parts(name, clients["rollout"], may_die=step > 1 and first == 1)
        else:
            clients["rollout"].request("rollout")
        if name == "crashes" and step == 2:
            raise GroupError("as ordered")
        if name == "dies" and step == 2 and not first > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hangs" and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        clients["rollout"].release()
        clients["train"].request("train")
        with open(folder / "steps.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "reward": 0.5}) + "\n")
        clients["train"].release()
        time.sleep(0.3 if name == "slow" else 0.02 if steps > 100 else 0.0)  # a long job outlasts the slow one's start
        if stopped:
            if name != "forgets":
                (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
                (folder / "config.toml").write_bytes(settings.read_bytes())
            sys.exit(143)


def decode_in_parts(name: str, client: Client, may_die: bool) -> None:
    """Roll out on what is there, and leave the first worker for the tail."""
    client.request("rollout", part=1)
    if name == "dies_with_a_part" and may_die and len(client.ranks) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while len(client.ranks) == 1:
        client.look()
        time.sleep(0.005)
    client.release([0])
    if name == "dies_in_the_tail_of_a_part" and may_die:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("ranks", "config", "group.server", "group.job"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("resume", "check"):
        parser.add_argument(f"--{name}", action="store_true")
    flags = vars(parser.parse_known_args()[0])
    settings = tomllib.loads(Path(flags["config"]).read_text())["run"]
    if flags["check"]:
        resumed, cores = ", resumed" * flags["resume"], os.environ["PLAINROLL_CORES"]
        seconds = os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
        print(f"fine for {flags['ranks']} ranks on cores {cores}; {seconds} s to end{resumed}")
        return 0
    folder, name = Path(settings["dir"]), flags["group.job"]
    records = folder / "steps.jsonl"
    first = 1 + len(records.read_text().splitlines()) if flags["resume"] and records.exists() else 1
    try:
        clients = {p: Client(flags["group.server"], name, p, "", 60.0, lambda: None) for p in ("train", "rollout")}
        play(name, settings["steps"], first, folder, clients, Path(flags["config"]))
    except GroupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


stopped: list[int] = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    sys.exit(main())
