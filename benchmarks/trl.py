"""Samples per second of a whole GRPO step, train.py against TRL's GRPOTrainer, on two CPU cores.

    python benchmarks/trl.py [--quick]

Both train the warm-started model of configs/tiny.toml on the same prompts in the same order, 32 x 8 samples a step,
with the same length limit, grader, loss, optimizer and fp32; a step is rollout, reward and training. `ratio` compares
equal algorithms, `ratio_tail_batching` one period of short rounds and a long one with as many steps of TRL, over the
same steps: means. Each side runs as one process with 2 threads and as two with 1, TRL also as four, in turns, so that
all share the machine's moods; its fastest form counts.
The first use makes the model and TRL's own environment, .venv-trl: minutes, not part of any figure.
benchmarks/end_to_end.py runs TRL too, on the lengths and texts that it gives its own contenders.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PINS = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
CORES, PROMPTS, RESPONSES = 2, 32, 8
PERIOD = 5  # rounds of tail batching with eta 1.25: four short ones and a long one
WARM_UP = PERIOD  # steps of every turn that are not counted
OURS = (
    f"--scheduler.num_prompts={PROMPTS}",
    f"--scheduler.num_responses={RESPONSES}",
    "--scheduler.policy=synchronous",
    "--loss.name=ppo",
    "--loss.advantage=dr_grpo",
    "--loss.normalisation=token",
    "--trainer.updates_per_step=1",
    "--trainer.lr_schedule=constant",
    "--data.eval_prompts=0",
    "--run.checkpoint_every=0",
)
TAIL, BATCHED = "+ tail batching", ("scheduler.policy=tail_batching", "scheduler.eta_responses=1.25")


@dataclass
class Side:
    """One way to run one of the two; `steps` collects its counted steps, turn by turn."""

    name: str
    ranks: int
    threads: int  # of a rank
    settings: tuple[str, ...] = ()
    warm_up: int = WARM_UP
    steps: list[dict] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [step["seconds"]["step"] for step in self.steps]


# ---- TRL's side --------------------------------------------------------------------------------------------------


def trl_python() -> str:
    """Return the interpreter of TRL's environment, which is made when it is missing or has other pins."""
    folder = ROOT / ".venv-trl"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8").split() != list(PINS):
        print(f"making {folder.name} with {', '.join(PINS)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
        ready.write_text("\n".join(PINS), encoding="utf-8")
    return str(python)


def trl_arguments(config: Any, ranks: int, micro_batch: int = 32) -> dict[str, Any]:
    """Return the fields of GRPOConfig that say what `config` says, and TRL's fastest settings.

    Found by hand on two cores, with 2 processes of a thread: continuous batching was faster than generate() and a
    static cache; micro-batches of 32 were faster than of 8, 16 and 128; tokens of a batch, blocks and pages hardly
    mattered.
    """
    size = config.scheduler
    return dict(
        num_generations=size.num_responses,
        max_completion_length=config.rollout.max_response_tokens,
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        shuffle_dataset=False,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="none",
        beta=config.loss.kl_coef,
        epsilon=config.loss.clip_low,
        epsilon_high=config.loss.clip_high,
        mask_truncated_completions=config.loss.mask_truncated,
        learning_rate=config.trainer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.trainer.lr_warmup_updates,
        adam_beta1=config.trainer.beta1,
        adam_beta2=config.trainer.beta2,
        weight_decay=config.trainer.weight_decay,
        max_grad_norm=config.trainer.grad_clip,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=size.num_prompts * size.num_responses // (micro_batch * ranks),
        gradient_checkpointing=False,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=dict(max_batch_tokens=128, page_size=32, num_blocks=1024),
        report_to="none",
        save_strategy="no",
        logging_steps=1,  # after a step's end, so not in its time
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )


def trl_worker(spec_path: Path) -> None:
    """Train on the spec's rows and write one JSON line per step. Runs in TRL's environment, on every rank.

    Rows may hold `lengths`, tokens of each response, and `texts`, what graders get instead of it. After every
    `pause_every` steps the model is saved beside the spec as model-STEP, with a file `ready` when it is whole; a file
    `answer` lets the training go on, or `stop`.
    """
    import torch
    import transformers
    from datasets import Dataset
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from trl import GRPOConfig, GRPOTrainer

    from rewards.graders import GRADERS

    add_to_queue = ContinuousBatchingManager.add_request

    torch.set_flush_denormal(True)  # as train.py does
    spec = json.loads(spec_path.read_text(encoding="utf-8"))
    steps = spec_path.with_name("steps.jsonl")

    count = spec["arguments"]["num_generations"]

    def grade(completions: list[str], answer: list[str], task: list[str], **columns: Any) -> list[Any]:
        if "texts" in columns:
            completions = [texts[i % count] for i, texts in enumerate(columns["texts"])]
        rows = columns.get("row") or [{}] * len(task)
        rewards = [GRADERS[t](c, a, r) for c, a, t, r in zip(completions, answer, task, rows, strict=True)]
        return [getattr(reward, "value", reward) for reward in rewards]

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: list[dict]) -> Any:
            if "lengths" in inputs[0]:
                own = [row["lengths"][i % count] for i, row in enumerate(inputs)]
                self.generation_config.eos_token_id = -1

                def add_request(manager: Any, input_ids: list[int], request_id: str, **rest: Any) -> str | None:
                    rest["max_new_tokens"] = own[int(request_id.removeprefix("req_"))]
                    return add_to_queue(manager, input_ids, request_id, **rest)

                ContinuousBatchingManager.add_request = add_request  # type: ignore[assignment]  # it is always named
            return super()._generate_and_score_completions(inputs)

    giver = Path("/proc", os.environ.get("TURNS_GIVEN_BY", "self"))  # as benchmarks/taking_turns.py

    class Stopwatch(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seconds = time.perf_counter() - self.start
            if not (every := spec.get("pause_every")) or state.global_step % every:
                return
            folder = spec_path.with_name(f"model-{state.global_step}")
            trainer.save_model(str(folder))
            trainer.accelerator.wait_for_everyone()
            (folder / "ready").touch()
            while not (answer := folder / "answer").exists():
                if not giver.exists():
                    raise TimeoutError("the process that lets this run go on has ended")
                time.sleep(0.2)
            control.should_training_stop = answer.read_text(encoding="utf-8") == "stop"

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and "reward" in logs:
                length = {name: logs[f"completions/{name}_length"] for name in ("mean", "max")}
                record = {
                    "step": state.global_step,
                    "seconds": {"step": self.seconds},
                    "length": length,
                    "reward": logs["reward"],
                }
                with open(steps, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")

    trainer = Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        grade,
        GRPOConfig(output_dir=str(spec_path.parent), **spec["arguments"]),
        Dataset.from_list(spec["rows"]),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[Stopwatch()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # an ordinary exit now and then aborts in one of its threads


# ---- taking turns ------------------------------------------------------------------------------------------------


def take_turn(side: Side, command: list[str], folder: Path, bar: tqdm) -> None:
    """Run `command`, which writes `folder`/steps.jsonl, and collect its steps after the warm-up."""
    from metrics import read_records

    threads = str(side.threads)
    env = os.environ | {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if side.ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={side.ranks}"]
        command = [command[0], *launch, *command[1:]]
    bar.set_postfix_str(f"{side.name}, {side.ranks} x {threads}")
    log, steps, first = folder / "log.txt", folder / "steps.jsonl", bar.n

    def done() -> list[dict]:
        return [record for record in read_records(steps) if record["step"]] if steps.exists() else []

    with open(log, "w") as file, subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file) as process:
        try:
            while process.poll() is None:
                time.sleep(0.5)
                bar.update(first + len(done()) - bar.n)
        except BaseException:
            process.terminate()
            raise
    records = done()
    if process.returncode or len(records) <= side.warm_up:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    bar.update(first + len(records) - bar.n)
    side.steps += records[side.warm_up :]


def measure(rounds: int, num_steps: int, ranks: tuple[int, ...], overrides: list[str]) -> list[Side]:
    """Let all sides take `rounds` turns of WARM_UP + `num_steps` steps; every round has prompts of its own."""
    import torch

    from checkpoint import load_tokenizer
    from config import load_config
    from data import PromptCursor, load_prompts
    from parallel import start
    from settings import Config
    from warm_start import ensure_model

    config_path = ROOT / "configs" / "tiny.toml"
    config = load_config(Config, str(config_path), [*OURS, *overrides])
    python = trl_python()
    torch.set_num_threads(CORES)
    model = ensure_model(config.warm_start, config.data.train, ROOT / "models", start("cpu", 60.0))
    prompts, _ = load_prompts(config.data, load_tokenizer(model), config.rollout.max_prompt_tokens)
    sides = []
    for n in ranks:
        size = n, max(CORES // n, 1)
        sides += [Side("plainroll", *size), Side(TAIL, *size, BATCHED)] if n <= CORES else []
        sides += [Side("TRL", *size)]
    with tqdm(total=rounds * sum(side.warm_up + num_steps for side in sides), unit="step") as bar:
        for seed in range(rounds):
            taken = PromptCursor(prompts, seed).take((WARM_UP + num_steps) * PROMPTS)
            rows = [
                {"prompt": prompt.text, "answer": prompt.answer, "task": prompt.task}
                for prompt in (visit.prompt for visit in taken)
            ]
            for side in sides:
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    if side.name == "TRL":
                        arguments = trl_arguments(config, side.ranks)
                        arguments |= {"max_steps": WARM_UP + num_steps, "seed": seed}
                        spec = {"model": str(model), "rows": rows, "arguments": arguments}
                        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
                        command = [python, __file__, "--trl-worker", str(folder / "spec.json")]
                    else:
                        last = side.warm_up + num_steps
                        own = (f"run.dir={name}", f"run.seed={seed}", f"run.steps={last}", f"model.path={model}")
                        keys = [*OURS, *overrides, *(f"--{key}" for key in (*side.settings, *own))]
                        command = [sys.executable, "train.py", "--config", str(config_path), *keys]
                    take_turn(side, command, folder, bar)
    return sides


# ---- results -----------------------------------------------------------------------------------------------------


def report(sides: list[Side]) -> None:
    """Print the table and, as the last line, the metrics in JSON."""
    size = PROMPTS * RESPONSES
    best: dict[str, Side] = {}
    print(
        f"{'':15} processes x threads   s/step (min .. max)   samples/s   tokens/s   mean length   max length   reward"
    )
    for side in sides:
        seconds, median = side.seconds, statistics.median(side.seconds)
        best[side.name] = min(best.get(side.name, side), side, key=lambda s: statistics.mean(s.seconds))
        mean = statistics.mean(step["length"]["mean"] for step in side.steps)
        print(
            f"{side.name:15} {side.ranks} x {side.threads}"
            f"{median:24.2f} ({min(seconds):.2f} .. {max(seconds):.2f}) {size / median:11.1f}"
            f"{size * mean * len(seconds) / sum(seconds):11.0f}{mean:14.1f}"
            f"{max(step['length']['max'] for step in side.steps):13.0f}"
            f"{statistics.mean(step['reward'] for step in side.steps):9.2f}"
        )
    ours, trl = best["plainroll"].seconds, best["TRL"].seconds
    pairs = sorted(b / a for a, b in zip(ours, trl, strict=True))  # of steps with the same prompts
    result = {
        "name": "trl",
        "samples_per_s_ours": round(size / statistics.median(ours), 1),
        "samples_per_s_trl": round(size / statistics.median(trl), 1),
        "ratio": round(sum(trl) / sum(ours), 2),
        "ratio_tail_batching": round(sum(trl) / sum(best[TAIL].seconds), 2),
        "ratio_of_pairs": [round(q, 2) for q in (pairs[0], statistics.median(pairs), pairs[-1])],
        "steps": len(pairs),
        "ranks_ours": best["plainroll"].ranks,
        "ranks_trl": best["TRL"].ranks,
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="under 2 minutes: fewer steps, and responses of at most 256 tokens"
    )
    parser.add_argument("--trl-worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[0] = str(ROOT)  # not benchmarks/: from there, `import trl` would find this file
    if arguments.trl_worker:
        trl_worker(arguments.trl_worker)
    elif arguments.quick:
        report(measure(1, PERIOD, (2,), ["--rollout.max_response_tokens=256"]))
    else:
        report(measure(3, PERIOD, (1, 2, 4), []))


if __name__ == "__main__":
    main()
