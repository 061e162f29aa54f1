"""Two machines, as network namespaces joined by a cable: one is lost, comes back, and the run goes on where it was."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from metrics import read_records

# In pools the machine that stays trains, and the lost one decodes.
WAYS: dict[str, dict[str, object]] = {
    "rounds": {},
    "pools": {"overlap.depth": 1, "overlap.bound": 3, "overlap.train_ranks": 2, "overlap.update_iterations": 8},
}
STEPS = 40  # so that the run has not ended before the machine is lost
# Runs as root of namespaces of its own. The other machine is all that lives in the namespace of $OTHER.
SCRIPT = r"""
set -e
unshare --net sleep 300 & OTHER=$!
until [ "$(readlink /proc/$OTHER/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link set lo up
ip link add veth0 type veth peer name veth1 netns $OTHER
ip addr add 10.9.0.1/24 dev veth0
ip link set veth0 up
nsenter -t $OTHER -n sh -c "ip link set lo up; ip addr add 10.9.0.2/24 dev veth1; ip link set veth1 up"
first() { GLOO_SOCKET_IFNAME=veth0 $TORCHRUN --local-addr=10.9.0.1 --rdzv-conf=is_host=1 "$@" > first.log 2>&1; }
second() {
    GLOO_SOCKET_IFNAME=veth1 nsenter -t $OTHER -n \
        $TORCHRUN --local-addr=10.9.0.2 --rdzv-conf=is_host=0 "$@" >> second.log 2>&1
}
first "$@" & FIRST=$!
second "$@" &
for i in $(seq 600); do sleep 0.1; [ -d run/checkpoints/step_000002 ] && break; done
kill -KILL $(pgrep --ns $OTHER --nslist net | grep -vx $OTHER)  # the power goes
second "$@" & SECOND=$!
wait $FIRST
wait $SECOND
kill $OTHER
"""


def namespaces_work() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "pgrep"))):
        return False
    command = "unshare --net true && ip link add veth0 type veth peer name veth1"
    tried = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", command], capture_output=True)
    return tried.returncode == 0


@pytest.mark.skipif("NODES" not in os.environ, reason="takes two minutes each; NODES=1 runs it")
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_machine_comes_back_and_nothing_is_lost(tiny_folder: Path, tmp_path: Path, way: str) -> None:
    if not namespaces_work():
        pytest.skip("network namespaces are not allowed here")
    rows = [{"prompt": f"count {i}", "answer": str(i)} for i in range(4 * STEPS + 8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "run.dir": "run",
        "run.steps": STEPS,
        "run.checkpoint_every": 2,
        "run.timeout_seconds": 20,
        "run.dump_rollouts": "true",
        "run.device": "cpu",
        "model.path": tiny_folder,
        "data.train": "data.jsonl",
        "data.task": f"{ROOT / 'tests' / 'graders.py'}:share_of_digits",
        "data.eval_prompts": 0,
        "scheduler.num_prompts": 4,
        "scheduler.num_responses": 4,
        "rollout.max_prompt_tokens": 32,
        "rollout.max_response_tokens": 64,
        "rollout.kv_gib": 0.01,
        "rollout.tensor_parallel": 2,
        **WAYS[way],
    }
    args = [str(ROOT / "train.py"), *(f"--{key}={value}" for key, value in options.items()), "--resume"]
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc_per_node=2 --max-restarts=3"
    torchrun += " --rdzv-backend=c10d --rdzv-endpoint=10.9.0.1:29511 --rdzv-id=test"
    command = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", SCRIPT, "bash", *args]
    environment = {"TORCHRUN": torchrun, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, timeout=240
    )
    logs = (tmp_path / "first.log").read_text(errors="replace") + (tmp_path / "second.log").read_text(errors="replace")
    assert done.returncode == 0, logs
    assert "resumed from" in logs
    records = read_records(tmp_path / "run" / "steps.jsonl")
    assert [r["step"] for r in records if r["step"]] == list(range(1, STEPS + 1))
    assert all(r["train"]["grad_norm"] > 0 for r in records if r["step"])
    assert {r["planner"]["size"] for r in records if "planner" in r} == ({2} if way == "rounds" else set())
    dumped = [json.loads(row) for path in (tmp_path / "run" / "rollouts").glob("*.jsonl") for row in path.open()]
    trained = Counter((row["epoch"], row["prompt"]["index"]) for row in dumped)
    assert len(trained) == 4 * STEPS and set(trained.values()) == {1}
    newest = max(span["version"] for row in dumped for sample in row["samples"] for span in sample["spans"])
    assert newest > STEPS / 2, "new weights reach the other machine"
