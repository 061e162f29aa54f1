"""New weights over a slow link between training ranks and decoding ranks: in parts, against a flat broadcast.

    python benchmarks/mux_sync.py [--quick]

Two network namespaces are two clusters, joined by a link of limited rate. `Pools.publish` sends each training rank's
part once and broadcasts it among the decoding ranks; flat is one broadcast among all ranks. Medians of seconds and
bytes, which the link's own counter tells. Needs user namespaces, `ip` and `tc`; where they are not allowed it says so.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parallel  # noqa: E402
from core import ModelShape  # noqa: E402
from metrics import Clock  # noqa: E402
from model import empty_model  # noqa: E402
from overlap.pools import make_pools  # noqa: E402

POOLS = ((1, 1), (1, 3), (2, 2))  # training and decoding ranks
MBIT = 400  # a second, over the link
SHAPE = ModelShape(
    vocab_size=1024,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=6,
    num_heads=12,
    num_kv_heads=2,
    head_dim=64,
    max_positions=512,
    norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4},
    tied=True,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
NEEDED = ("unshare", "nsenter", "ip", "tc")
PREPARE = r"""
set -e
unshare --net sleep 3600 & OTHER=$!
trap 'kill $OTHER $(jobs -p) 2> /dev/null' EXIT
until [ "$(readlink /proc/$OTHER/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link set lo up
ip link add veth0 type veth peer name veth1 netns $OTHER
tc qdisc add dev veth0 root tbf rate ${MBIT}mbit burst 256kb latency 400ms
"""
# Runs as root of namespaces of its own. The decoding ranks are in the namespace of $OTHER.
SCRIPT = rf"""
{PREPARE}
ip addr add 10.9.0.1/24 dev veth0
ip link set veth0 up
nsenter -t $OTHER -n sh -c "tc qdisc add dev veth1 root tbf rate ${{MBIT}}mbit burst 256kb latency 400ms;
    ip link set lo up; ip addr add 10.9.0.2/24 dev veth1; ip link set veth1 up"
for ((i = 0; i < WORLD_SIZE; i++)); do
    place="env RANK=$i GLOO_SOCKET_IFNAME=veth0"
    ((i < TRAINERS)) || place="nsenter -t $OTHER -n env RANK=$i GLOO_SOCKET_IFNAME=veth1"
    $place "$@" & RANKS[$i]=$!
done
for pid in ${{RANKS[@]}}; do wait $pid; done
"""


def isolated(script: str, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a shell script as root of a user and a network namespace of its own; `command` are its arguments."""
    unshared = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", script, "bash", *command]
    return subprocess.run(unshared, env=os.environ | environment, stderr=subprocess.PIPE, text=True, timeout=600)


def problem() -> str:
    """Return why there can be no slow link here; empty where there can."""
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        return f"{', '.join(missing)} not found; install util-linux and iproute2"
    done = isolated(PREPARE, MBIT=str(MBIT))
    return f"network namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def measure(trainers: int, layers: int, repeats: int, path: Path) -> None:
    """Send weights both ways as one of the ranks; rank 0 writes the medians of seconds and bytes."""
    world = parallel.start("cpu", 120.0)
    pools = make_pools(world, trainers, Clock())
    model = empty_model(replace(SHAPE, num_layers=layers)).to_empty(device="cpu")
    weights = [weight.detach() for weight in model.parameters()]
    ways: dict[str, Callable[[], object]] = {
        "parts": lambda: pools.publish(model, None),
        "flat": lambda: parallel.broadcast_tensors(world, weights),
    }
    found: dict[str, float] = {"model_bytes": sum(weight.nbytes for weight in weights)}
    for way, send in ways.items():
        rows = []
        for repeat in range(repeats):
            for weight in weights:
                weight.fill_(repeat + 1 if pools.trains else 0)
            parallel.barrier(world)
            before = bytes_sent()
            parallel.barrier(world)  # no rank sends before rank 0 has read the counter
            start = time.perf_counter()
            send()
            parallel.barrier(world)
            rows.append((time.perf_counter() - start, bytes_sent() - before))
            assert all((weight == repeat + 1).all() for weight in weights), "weights have not arrived"
        seconds, num_bytes = map(statistics.median, zip(*rows, strict=True))
        found |= {f"{way}_seconds": seconds, f"{way}_bytes": num_bytes}
    if world.is_main:
        path.write_text(json.dumps(found | pools.synced))
    parallel.stop(world)


def bytes_sent() -> int:
    """Return the bytes that this namespace has sent over the link, where it is the training ranks'."""
    _, at, counts = Path("/proc/net/dev").read_text(encoding="utf-8").partition("veth0:")
    return int(counts.split()[8]) if at else 0


def compare(trainers: int, decoders: int, quick: bool) -> dict[str, float]:
    """Return what `measure` found, with one part of the ranks in each of two namespaces."""
    layers, repeats = (1, 1) if quick else (SHAPE.num_layers, 3)
    size, environment = str(trainers + decoders), dict(MASTER_ADDR="10.9.0.1", MASTER_PORT="29517", MBIT=str(MBIT))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        worker = (sys.executable, __file__, "--worker", str(trainers), str(layers), str(repeats), str(path))
        done = isolated(SCRIPT, *worker, WORLD_SIZE=size, TRAINERS=str(trainers), LOCAL_WORLD_SIZE="1", **environment)
        if done.returncode:
            raise RuntimeError(f"the ranks ended with code {done.returncode}:\n{done.stderr}")
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, 2 and 2 ranks: seconds")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        trainers, layers, repeats, path = asked.worker
        return measure(int(trainers), int(layers), int(repeats), Path(path))
    if reason := problem():
        sys.exit(reason)
    print(f"link of {MBIT} Mbit/s\n{'ranks':<8}{'way':<8}{'seconds':>8}{'at its rate':>14}{'bytes / model':>15}")
    rows, metrics = list[dict[str, object]](), dict[str, object]()
    for trainers, decoders in POOLS[-1:] if asked.quick else POOLS:
        ranks, found = f"{trainers} -> {decoders}", compare(trainers, decoders, asked.quick)
        for way in ("parts", "flat"):
            seconds, sent = found[f"{way}_seconds"], found[f"{way}_bytes"]
            at_rate, copies = 8e-6 * sent / MBIT, sent / found["model_bytes"]
            print(f"{ranks:<8}{way:<8}{seconds:>8.2f}{at_rate:>14.2f}{copies:>15.3f}")
            row = {"seconds": round(seconds, 2), "at_rate": round(at_rate, 2), "copies": round(copies, 3)}
            rows.append({"ranks": ranks, "way": way, **row})
        metrics[f"speedup_{trainers}_{decoders}"] = round(found["flat_seconds"] / found["parts_seconds"], 2)
        metrics |= {"copies_in_parts": round(found["parts_bytes"] / found["model_bytes"], 3)}
        metrics |= {
            "sync_bytes_over_model": found["sync_bytes"] / found["model_bytes"],
            "megabytes": found["model_bytes"] / 1e6,
        }
    print(json.dumps({"name": "mux_sync", "link_mbit": MBIT, "rows": rows, **metrics}))


if __name__ == "__main__":
    main()
