"""Break real runs of 2 and 4 ranks on purpose, at every stage, and see that each goes on as if nothing had happened.

    python benchmarks/faults.py [--quick] [--jobs 3]

Each kind of fault comes once at each stage of each kind of run, on one rank after the other. A run has a list of
faults. After each the ranks that are left must end by themselves with one line of error; then all are started again
with `--resume`, as torchrun would. In the end the run must have the losses of an undisturbed run, bit by bit, and every
prompt must have been trained exactly once.

    rounds     the rollout ends before training        turns  updates interrupt the rollout (`overlap.depth`)
    streamed   half of the ranks leave each rollout    pools  one rank trains while the other decodes
               to train (`stream.policy`): losses must be those of a run in which nobody does, but for rounding
    episodes   rounds whose responses have several turns      episodes in turns  the same with `overlap.depth`

    kill       SIGKILL of one rank                            stop      SIGSTOP: a rank that hangs
    cut        one rank's network connections are cut         nan       three losses that are not numbers
    full       a checkpoint's file gets room for a part only  readonly  the checkpoint's folder cannot be written
    truncated  the newest checkpoint is cut in half           flipped   one bit of it is wrong
    worker     a reward worker is killed: the sample gets reward 0 and the cause is recorded, so the losses may differ
    player     an environment's worker is killed              frozen    it is stopped
    error      an environment raises, twice                   hang      it answers no more; all four cost no run and no
               bit of its losses, because episodes are replayed
    failed     it raises so often that an episode fails: that is recorded, and the losses are the same

Ranks are forked from one process that has imported everything, which saves seconds a start; the rest is `train.py`.
On two cores all of it takes about ten minutes: most faults take 2 to 5 seconds, and `stop` the time-out of the others.
On a machine that is so busy that a time-out ends a run before its fault comes, the run is started again.
`resumed`: went on to the same losses; `clear_errors`: told what to do, and did go on once that was done.
"""

import argparse
import itertools
import json
import math
import multiprocessing as mp
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tail_batching import trained  # noqa: E402
from tqdm import tqdm  # noqa: E402

import checkpoint  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402
from envs.episodes import Episodes  # noqa: E402
from job import Job  # noqa: E402
from metrics import read_records  # noqa: E402
from overlap.endless import Endless  # noqa: E402
from overlap.pools import Pools  # noqa: E402
from overlap.streamed import StreamedRound  # noqa: E402
from rewards.judge import AllGraders  # noqa: E402
from rollout import Engine  # noqa: E402
from rounds import Round  # noqa: E402
from trainer import Trainer  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

STEPS, EVERY = 12, 2  # steps of a run, and from checkpoint to checkpoint
TIMEOUT = 12.0  # seconds of the longest wait for a rank that a fault may come to,
PATIENCE = 120.0  # and of runs that must end well
TRIES = 5  # to have a fault come
PROMPTS = 8  # of a step
SYNCHRONOUS = "--scheduler.policy=synchronous"
STREAM = "--stream.policy=fixed", "--stream.fixed_share=0.2", "--scheduler.window_iterations=2"
AHEAD = SYNCHRONOUS, "--overlap.depth=1", "--overlap.bound=3", "--scheduler.window_iterations=4"
EVALUATED = "--data.eval_prompts=2", "--run.eval_samples=1", f"--run.eval_every={EVERY}"
APART = "--overlap.train_ranks=1", "--overlap.update_iterations=8"
GRADER = "def digits(response, answer, row):\n    return sum(c.isdigit() for c in response) / max(len(response), 1)\n"
ENVIRONMENT = """
import os, time
from contextlib import suppress
from pathlib import Path
from environments import Reply

def chat(row, seed):
    reward, text = 0.0, ""
    for _ in range(3):
        action = yield Reply(text, reward)
        for order in Path(os.environ["ORDERS"]).glob("*"):
            with suppress(FileNotFoundError):
                order.unlink()  # whoever does it follows it
                time.sleep(60 if order.name == "hang" else 0)
                raise ConnectionError("as ordered")
        reward, text = sum(c.isdigit() for c in action) / 8, f"[{len(action)}]"
    return reward
"""
EPISODES = (
    *("--data.env={base}/environment.py:chat", "--data.task=env"),
    *("--env.clock=steps", "--env.num_workers=1", "--env.step_seconds=4"),
)
# The fault comes when the function is called for the first time in its step, or in the next step that comes by there.
STAGES = {
    "rollout": (Engine, "step"),
    "reward": (AllGraders, "poll"),
    "window": (Round, "tell"),
    "exchange": (Round, "collect"),
    "gradient": (Trainer, "accumulate"),
    "update": (Trainer, "update"),
    "optimizer": (Trainer, "_step"),
    "sync": (Engine, "load_weights"),
    "checkpoint": (Job, "save"),
    "weights file": (checkpoint._Writer, "write_data"),  # in the thread that writes
    "state file": (checkpoint._Writer, "finish"),
    "next step": (Round, "begin"),
    "scale down": (StreamedRound, "_scale_down"),
    "stream feed": (StreamedRound, "_send"),
    "stream train": (StreamedRound, "_train_batch"),
    "stream end": (StreamedRound, "_reunite"),
    "prefill": (Engine, "prefill"),
    "new weights": (Endless, "take_weights"),
    "evaluation": (Job, "evaluate"),
    "wait": (Pools, "wait_for"),  # of one pool for the other
    "hand over": (Pools, "hand_over"),
    "decode on": (Endless, "decode_on"),
    "publish": (Pools, "publish"),
    "turn": (Episodes, "end_turn"),
}


@dataclass(frozen=True)
class Way:
    """A way to run, and the stages in which its runs are broken."""

    settings: tuple[str, ...]
    stages: tuple[str, ...]  # that all ranks come by
    first_half: tuple[str, ...] = ()  # stages of the first half of the ranks only
    second_half: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (2,)  # ranks
    #: Settings of the undisturbed run, where they are others: then losses differ by rounding.
    plain: tuple[str, ...] = ()


WAYS = {
    "rounds": Way(
        (),
        ("rollout", "reward", "window", "exchange", "gradient", "update", "optimizer", "sync", "checkpoint")
        + ("weights file", "state file", "next step"),
    ),
    "streamed": Way(
        (SYNCHRONOUS, *STREAM),
        ("scale down", "stream end"),
        ("stream feed",),
        ("stream train",),
        sizes=(2, 4),  # one rank leaves, or two that go on together
        plain=(SYNCHRONOUS,),
    ),
    "turns": Way(
        (*AHEAD, *EVALUATED),
        ("prefill", "rollout", "window", "exchange", "gradient", "new weights", "evaluation", "checkpoint"),
    ),
    "pools": Way(
        (*AHEAD, *EVALUATED, *APART),
        ("wait", "hand over", "publish", "evaluation", "checkpoint"),
        ("gradient", "optimizer"),
        ("rollout", "window", "decode on", "new weights"),
    ),
    "episodes": Way(EPISODES, ("turn", "exchange", "checkpoint")),
    "episodes in turns": Way((*AHEAD, *EVALUATED, *EPISODES), ("turn", "new weights", "evaluation", "checkpoint")),
}
ON_MAIN = ("state file",)  # only rank 0 writes it
AT_CHECKPOINT = ("checkpoint", "weights file", *ON_MAIN)
ON_DISK = ("truncated", "flipped")
FINE = ("resumed", "clear error", "recorded")
OF_EPISODES = ("player", "frozen", "error", "hang", "failed")
GOES_ON = ("worker", *OF_EPISODES)  # the run, with all its ranks
ALONE = ("nan", *GOES_ON)  # in a run
SHARE = 11  # of `--quick`


@dataclass(frozen=True)
class Fault:
    kind: str
    stage: str
    rank: int
    way: str = "rounds"
    step: int = 0


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    ranks: int
    what: str  # resumed, clear error, recorded, or what went wrong
    seconds: float  # until all ranks had ended


def all_faults(ranks: int) -> list[Fault]:
    """Return every fault of runs with so many ranks; their steps are not decided."""
    faults, ways = list[Fault](), {name: way for name, way in WAYS.items() if ranks in way.sizes}
    for kind, name in itertools.product(("kill", "cut", "stop"), ways):
        way = ways[name]
        for stage in (*way.stages, *way.first_half, *way.second_half):
            among = ranks_in(way, stage, ranks)
            faults.append(Fault(kind, stage, among[len(faults) % len(among)], name))
    if ranks > 2:
        return faults
    faults += [Fault(kind, "weights file", 0, name) for kind in ("full", "readonly") for name in ways]
    faults += [Fault(kind, "next step", 0) for kind in ON_DISK for _ in range(2)]  # two files
    faults += [Fault("nan", "gradient", 1), Fault("nan", "gradient", 0, "pools")]
    faults += [Fault("worker", "reward", 0), Fault("worker", "reward", 1, "pools")]
    turns = [name for name, way in ways.items() if "turn" in way.stages]
    pairs = enumerate(itertools.product(turns, OF_EPISODES))
    return faults + [Fault(kind, "turn", number % 2, name) for number, (name, kind) in pairs]


def ranks_in(way: Way, stage: str, ranks: int) -> range:
    """Return the ranks that come by there."""
    if stage in ON_MAIN:
        return range(1)
    return range(ranks // 2 * (stage in way.second_half), ranks // 2 if stage in way.first_half else ranks)


def into_runs(faults: list[Fault]) -> list[list[Fault]]:
    """Give each fault a step of its own, in as few runs as have room for them."""
    runs: list[list[Fault]] = []
    for fault in faults:
        # Three losses in a row that are not numbers must not be in a checkpoint; a checkpoint must be there to break.
        steps = range(2 * EVERY + 1, STEPS) if fault.kind in ON_DISK else range(2, STEPS)
        if fault.stage in AT_CHECKPOINT:
            steps = range(EVERY, STEPS, EVERY)
        for run in runs + [[]]:
            fits = all(f.way == fault.way and not {f.kind, fault.kind} & set(ALONE) for f in run)
            free = [s for s in steps if s not in {f.step for f in run}]
            if free and fits:
                run.append(replace(fault, step=4 if fault.kind == "nan" else free[0]))
                if len(run) == 1:
                    runs.append(run)
                break
    return [sorted(run, key=lambda f: f.step) for run in runs]


# ---- in the rank that breaks -------------------------------------------------------------------------------------


def arm(fault: Fault, fired: Path) -> None:
    """Have the fault come in this process, once."""
    place: dict[str, Any] = {}
    run_training = train.train

    def note_clock(config: Any, world: Any, resume: bool, clock: Any = None, callbacks: Any = ()) -> None:
        place["clock"] = clock
        run_training(config, world, resume, clock, callbacks)

    train.train = note_clock
    owner, name = STAGES[fault.stage]
    original = getattr(owner, name)

    def breaks(*args: Any, **kwargs: Any) -> Any:
        if place["clock"].step >= fault.step and not fired.exists():
            fired.touch()
            KINDS[fault.kind](args)
        return original(*args, **kwargs)

    setattr(owner, name, breaks)


def kill(args: tuple) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(args: tuple) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def cut(args: tuple) -> None:
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                peer = socket.socket(fileno=os.dup(int(entry)))
                if peer.family in (socket.AF_INET, socket.AF_INET6):
                    peer.getpeername()  # one that listens has none, and stays
                    peer.shutdown(socket.SHUT_RDWR)


def full(args: tuple) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, most))  # a part of the weights


def readonly(args: tuple) -> None:
    folder = args[0].part
    if os.geteuid() == 0:  # who may write anywhere
        os.chmod(folder.parent, 0o755)
        os.seteuid(65534)
    else:
        folder.chmod(0o500)


def nan(args: tuple) -> None:
    add = Trainer._add_gradients

    def add_nan(self: Trainer, batch: Any) -> None:
        add(self, batch)
        self.sums[0] = float("nan")

    Trainer._add_gradients = add_nan


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def worker(args: tuple) -> None:
    for child in children(os.getpid()):
        os.kill(child, signal.SIGKILL)


def frozen(args: tuple) -> None:
    for keeper in children(os.getpid()):
        for child in children(keeper):
            os.kill(child, signal.SIGSTOP)


def order(*names: str) -> Callable[[tuple], None]:
    """Have the environment find these files."""

    def write(args: tuple) -> None:
        for name in names:
            Path(os.environ["ORDERS"], name).touch()

    return write


KINDS: dict[str, Callable[[tuple], None]] = {
    "kill": kill,
    "stop": stop,
    "cut": cut,
    "full": full,
    "readonly": readonly,
    "nan": nan,
    "worker": worker,
    "player": worker,
    "frozen": frozen,
    "error": order(*"12"),
    "hang": order("hang"),
    "failed": order(*"123456"),
    "truncated": kill,
    "flipped": kill,
}

# ---- one life of a run -------------------------------------------------------------------------------------------


def live(ranks: int, args: list[str], fault: Fault | None, fired: Path, log: Path) -> tuple[list[int], float, bool]:
    """Start all ranks and wait for their ends. Returns (exit codes, seconds from the fault to them, was there a hang).

    When one has ended the others must follow. One that was stopped, or that the others gave up, is killed in the end.
    """
    timeout = TIMEOUT if fault and fault.kind not in GOES_ON else PATIENCE
    args = [*args, f"--run.timeout_seconds={timeout}"]
    log.write_text("")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pids = [_fork(rank, ranks, store.port, args, fault, fired, log) for rank in range(ranks)]
    ends: dict[int, int] = {}
    first = limit = 0.0
    started, hang = time.monotonic(), False
    while len(ends) < ranks:
        for rank, pid in enumerate(pids):
            if rank not in ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if any(ends.values()) and not first:
            first, limit = now, now + 2 * timeout + PATIENCE
        stopped = {fault.rank} if fault and fault.kind == "stop" else set()
        left = set(range(ranks)) - ends.keys()
        late = now > (limit or started + 10 * PATIENCE)
        if left and (late or (first and left <= stopped)):
            hang = hang or bool(left - stopped)
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.02)
    since = fired.stat().st_mtime if fired.exists() else time.time()
    return [ends[rank] for rank in range(ranks)], time.time() - since, hang


def _fork(rank: int, ranks: int, port: int, args: list[str], fault: Fault | None, fired: Path, log: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "ORDERS": f"{fired}_orders"}
        os.makedirs(os.environ["ORDERS"], exist_ok=True)
        torch.set_num_threads(1)
        if fault and fault.rank == rank:
            arm(fault, fired)
        code = train.main(args)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def break_checkpoint(folder: Path, kind: str, turn: int) -> None:
    """Damage one file of a checkpoint."""
    path = folder / ("optimizer/shard-00000.safetensors", "model.safetensors")[turn % 2]
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- one run -----------------------------------------------------------------------------------------------------


def trajectory(folder: Path) -> list[tuple]:
    return [
        (r["step"], r["reward"], r["tokens"], r["train"]["loss"], r["train"]["grad_norm"])
        for r in read_records(folder / "steps.jsonl")[1:]
    ]


def same_losses(mine: list[tuple], theirs: list[tuple], but_for_rounding: bool) -> bool:
    """Whether two trajectories are equal, bit by bit or within 1e-5 (losses are sums of both signs)."""
    if not but_for_rounding:
        return mine == theirs
    pairs = [pair for rows in zip(mine, theirs) for pair in zip(*rows)]
    return len(mine) == len(theirs) and all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) for a, b in pairs)


def settings(base: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"--run.dir={folder}",
        f"--run.steps={STEPS}",
        f"--run.checkpoint_every={EVERY}",
        "--run.dump_rollouts=true",
        "--run.device=cpu",
        f"--model.path={base / 'model'}",
        f"--data.train={base / 'prompts.jsonl'}",
        f"--data.task={base / 'grader.py'}:digits",
        "--data.eval_prompts=0",
        f"--scheduler.num_prompts={PROMPTS}",
        "--scheduler.num_responses=4",
        "--rollout.max_prompt_tokens=32",
        "--rollout.max_response_tokens=48",
        "--rollout.page_size=8",
        "--rollout.kv_gib=0.01",
        "--trainer.lr=3e-3",
        "--reward.num_workers=1",
        f"--reward.timeout_seconds={TIMEOUT}",
        *(argument.format(base=base) for argument in more),
        "--resume",
    ]


def drill(base: Path, ranks: int, faults: list[Fault], number: int, done: Any) -> None:
    """Play one run with all its faults; put an Outcome for each into `done`, then what the run came to."""
    folder, fired = base / f"run{ranks}_{number}", base / f"fired{ranks}_{number}"
    way, straight = WAYS[faults[0].way], base / f"straight{ranks}_{faults[0].way}"
    more = list(way.settings)
    if faults[0].kind == "nan":
        more += [f"--run.checkpoint_every={STEPS}"]  # or updates that were skipped would be in a checkpoint
    args, log = settings(base, folder, *more), base / f"run{ranks}_{number}.log"
    outcomes, clean = [], True
    for turn, fault in enumerate(faults):
        fired.unlink(missing_ok=True)
        for _ in range(TRIES):
            codes, seconds, hang = live(ranks, args, fault, fired, log)
            if fired.exists() or hang:
                break
        what, said = "resumed", log.read_text()
        if hang:
            what = "HANG"
        elif not fired.exists():
            what = "NEVER CAME"
        elif fault.kind in GOES_ON:
            records = read_records(folder / "steps.jsonl")[1:]
            errors = sum(r["reward_errors"] + r.get("episodes", {}).get("failed", 0) for r in records)
            what = f"DIED: {codes}" if any(codes) else "recorded" if errors else "resumed"  # idle: nothing was lost
        elif "Traceback" in said or not any(codes) or not (ranks == 1 or "error: " in said):
            what = f"NO CLEAR ERROR: exit codes {codes}"
        elif fault.kind in ("full", "readonly", "nan"):
            what = "clear error"
        if fault.kind in ON_DISK and what == "resumed":
            newest = checkpoint.list_checkpoints(folder)[-1]
            break_checkpoint(newest, fault.kind, turn)
            start = time.monotonic()
            codes, _, _ = live(ranks, args, None, fired, log)
            seconds = time.monotonic() - start
            told = f"remove {newest}" in log.read_text() and "Traceback" not in log.read_text()
            what = "clear error" if told and all(codes) else f"DAMAGE NOT SEEN: {codes}"
            shutil.rmtree(newest)
        if what not in FINE:
            shutil.copy(log, log.with_suffix(f".{turn}.log"))
        clean = clean and what in FINE
        outcomes.append(Outcome(fault, ranks, what, seconds))
        done.put(outcomes[-1])
    codes, _, _ = live(ranks, args, None, fired, log)
    same = same_losses(trajectory(folder), trajectory(straight), but_for_rounding=bool(way.plain))
    expected, found = trained(straight), trained(folder)
    exact = None if any(f.kind == "worker" for f in faults) else same  # its sample has no reward
    done.put(
        (
            f"{ranks} ranks, run {number}",
            codes,
            exact,
            sum((expected - found).values()),
            sum((found - expected).values()),
        )
    )
    if clean and exact is not False and not any(codes):
        shutil.rmtree(folder)


def prepare(base: Path) -> None:
    (base / "grader.py").write_text(GRADER)
    (base / "environment.py").write_text(ENVIRONMENT)
    rows = [{"prompt": "count " + "up " * (i % 5) + str(i), "answer": str(i)} for i in range(64)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
    make_model(shape, "hailstone", base / "model", parallel.World(0, 1, torch.device("cpu")))
    # One token in sixteen ends a response of a random model: lengths have a tail, and there is something to abort.
    (base / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(16))}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"one fault in {SHARE} of 2 ranks: under 2 minutes on 2 cores"
    )
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side (default 3)")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="faults_"))
    base.chmod(0o755)
    prepare(base)
    work: list[tuple[Path, int, list[Fault], int, Any]] = []
    done: mp.Queue = mp.Queue()
    for ranks in (2,) if arguments.quick else (2, 4):
        for name, way in WAYS.items():
            if ranks in way.sizes:
                straight = base / f"straight{ranks}_{name}"
                args, log = settings(base, straight, *(way.plain or way.settings)), straight.with_suffix(".log")
                codes, _, _ = live(ranks, args, None, base / "none", log)
                assert not any(codes), log.read_text()
                assert set(trained(straight).values()) == {1}, "a prompt was trained twice"
        faults = all_faults(ranks)[:: SHARE if arguments.quick else 1]
        work += [(base, ranks, run, number, done) for number, run in enumerate(into_runs(faults))]
    outcomes, runs, drivers = list[Outcome](), list[Any](), list[BaseProcess]()
    total = sum(len(run) for _, _, run, _, _ in work)
    bar = tqdm(total=total, unit="fault", disable=None)
    left = list(work)
    while len(runs) < len(work):
        drivers = [d for d in drivers if d.is_alive()]
        while left and len(drivers) < arguments.jobs:
            drivers.append(mp.get_context("fork").Process(target=drill, args=left.pop(0)))
            drivers[-1].start()
        if not drivers and done.empty():
            raise SystemExit("a driver has died; see its message above")
        if done.empty():
            time.sleep(0.05)
            continue
        result = done.get()
        if isinstance(result, Outcome):
            outcomes.append(result)
            bar.update()
        else:
            runs.append(result)
    bar.close()
    for driver in drivers:  # they tidy up
        driver.join()
    report(outcomes, runs)
    bad = [o for o in outcomes if o.what not in FINE] or [r for r in runs if is_bad(r)]
    if bad:
        print(f"logs: {base}", file=sys.stderr)
    else:
        shutil.rmtree(base)
    print(json.dumps(metrics(outcomes, runs)))
    return 1 if bad else 0


def report(outcomes: list[Outcome], runs: list[tuple]) -> None:
    rows: dict[tuple, list[Outcome]] = {}
    for o in outcomes:
        rows.setdefault((o.fault.kind, o.fault.way, o.fault.stage, o.what), []).append(o)
    print(
        "| fault | in a run of | in stage | times | seconds until all had ended | outcome |\n|---|---|---|---|---|---|"
    )
    for (kind, way, stage, what), same in sorted(rows.items(), key=lambda row: (list(KINDS).index(row[0][0]), row[0])):
        seconds = sorted(o.seconds for o in same)
        print(f"| {kind} | {way} | {stage} | {len(same)} | {seconds[0]:.1f} to {seconds[-1]:.1f} | {what} |")
    for name, codes, exact, lost, doubled in filter(is_bad, runs):
        print(f"{name}: exit codes {codes}, same losses: {exact}, {lost} prompts lost, {doubled} doubled")


def is_bad(run: tuple) -> bool:
    _, codes, exact, lost, doubled = run
    return any(codes) or exact is False or bool(lost or doubled)


def metrics(outcomes: list[Outcome], runs: list[tuple]) -> dict:
    count = Counter(o.what for o in outcomes)
    return {
        "name": "faults",
        "injected": len(outcomes) - count["NEVER CAME"],
        "resumed": count["resumed"],
        "clear_errors": count["clear error"],
        "recorded": count["recorded"],
        "hangs": count["HANG"],
        "other": sum(n for what, n in count.items() if what not in (*FINE, "HANG")),
        "runs": len(runs),
        "runs_compared": sum(exact is not None for _, _, exact, _, _ in runs),
        "runs_with_other_losses": sum(exact is False for _, _, exact, _, _ in runs),
        "prompts_lost": sum(run[3] for run in runs),
        "prompts_doubled": sum(run[4] for run in runs),
        "timeout_seconds": TIMEOUT,
        "slowest_seconds": round(max(o.seconds for o in outcomes if o.fault.kind not in GOES_ON), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
