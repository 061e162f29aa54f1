"""The teacher: what it says of tokens, the gradients that this makes, alone and beside rewards, and whole runs."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import ALONE, ROOT, steps_of, train_runs
from test_golden import RACES, trajectory
from test_judge import tiny
from test_trainer import MAX_RESPONSE, assert_same_gradient, gradient, padded_distributions
from torch import Tensor
from transformers import AutoModelForCausalLM

import train
from core import Example, SampleId, Span
from loss import LossConfig
from model import Model
from rewards.offload import token_bytes
from rewards.teacher import DistillConfig, Teacher
from sampling import SamplingConfig
from trainer import SUMS, Trainer, TrainerConfig

CPU, V, TINY_V = torch.device("cpu"), 264, 258  # the teacher's vocabulary, padded beyond that of the student
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen3", tmp_path_factory.mktemp("teachers") / "teacher", tiny_folder, vocab_size=V)


@pytest.fixture
def examples() -> list[Example]:
    """One with given tokens between two spans, one that a prompt of one token begins."""
    spans = ((Span(0, 3, 0), Span(6, 11, 0)), (Span(0, 4, 0),), (Span(1, 9, 0),))
    prompts = (5, 7, 11), (13,), (17, 19)
    return [
        Example(SampleId(0, i, 0), prompt, tuple(range(20 + i, 20 + i + own[-1].end)), own, (0.0,) * 11, 0.5 - i)
        for i, (prompt, own) in enumerate(zip(prompts, spans, strict=True))
    ]


def distribution(folder: Path, examples: Sequence[Example], dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
    """Log-probs over the student's vocabulary at the sampled tokens, by transformers. [T, V]"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return of_sampled(model, examples, temperature)


def of_sampled(model, examples: Sequence[Example], temperature: float = 1.0) -> Tensor:
    rows = padded_distributions(model, examples).split([len(e.token_ids) for e in examples])
    rows = [part[span.start : span.end] for part, e in zip(rows, examples, strict=True) for span in e.spans]
    return (torch.cat(rows)[:, :TINY_V] / temperature).log_softmax(-1)


def make_trainer(model: Model, folder: Path, temperature: float = 1.0, part: int = 4096, **distill) -> Trainer:
    sampling, config = SamplingConfig(temperature), TrainerConfig(tokens_per_microbatch=24, tokens_per_logits=part)
    teacher = Teacher(DistillConfig(str(folder), **distill), TINY_V, sampling, CPU, torch.float32) if distill else None
    return Trainer(model, config, LossConfig(), sampling, ALONE, MAX_RESPONSE, 10, teacher=teacher)


def gradient_of(model: Model, examples: Sequence[Example], folder: Path, **settings) -> Tensor:
    for param in model.parameters():
        param.grad = None
    trainer = make_trainer(model, folder, **settings)
    trainer.accumulate(examples)
    return gradient(trainer).clone()


def drawn_by(model: Model, examples: Sequence[Example]) -> list[Example]:
    """Return examples whose log-probs are the model's own: the ratio is 1."""
    trainer = Trainer(model, TrainerConfig(), LossConfig(), SamplingConfig(), ALONE, MAX_RESPONSE, 10)
    with torch.no_grad():
        found = []
        for e in examples:
            own = trainer._score(model, [e])[0].tolist()
            placed = [0.0] * len(e.token_ids)
            for span in e.spans:
                placed[span.start : span.end], own = own[: len(span)], own[len(span) :]
            found.append(Example(e.id, e.prompt_ids, e.token_ids, e.spans, tuple(placed), e.advantage))
    return found


def exact(folder: Path, model: Model, loss_of: Callable[[Tensor], Tensor], examples: Sequence[Example]) -> Tensor:
    """Return the gradient of a loss of the student's distributions [T, V], by transformers in float64, in our order."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss_of(of_sampled(theirs, examples)).backward()
    named, holder = dict(theirs.named_parameters()), Model(model.shape).double()
    for name, view, _ in holder.hf_tensors():
        view.copy_(named[name].grad.view(view.shape))
    return torch.cat([p.detach().flatten() for p in holder.parameters()]).float()


# ---- what it says


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("resident", [LAYERS, 1, 0])
@torch.no_grad()
def test_logprobs_are_those_of_transformers(folder, tiny_model, examples, resident: int, top_k: int) -> None:
    teacher = make_trainer(tiny_model, folder, temperature=0.7, top_k=top_k, coef=2.0).teacher
    assert teacher
    texts, tokens = [[*e.prompt_ids, *e.token_ids] for e in examples], sum(e.num_tokens for e in examples)
    needed = (
        teacher.fixed_bytes + resident * teacher.layers.layer_bytes + tokens * token_bytes(teacher.shape, torch.float32)
    )
    teacher.memory_gib = (needed + 2.5 * teacher.layers.layer_bytes * (resident < LAYERS)) / 2**30
    starts = [0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()]
    places = [
        start + len(e.prompt_ids) - 1 + at
        for e, start in zip(examples, starts)
        for span in e.spans
        for at in range(span.start, span.end)
    ]
    flat = sum(texts, [])
    wanted = distribution(folder, examples, torch.float32, temperature=0.7)
    for _ in range(2):  # the buffers go on from forward to forward
        logprobs, ids = teacher(texts, places, [flat[place + 1] for place in places])
        assert len(teacher.layers.resident) == resident
        if top_k:
            values, likeliest = wanted.topk(top_k)
            assert list(ids) == likeliest.flatten().tolist()
        else:
            values, likeliest = wanted.gather(1, torch.tensor([[flat[place + 1]] for place in places])), None
            assert len(ids) == 0
        torch.testing.assert_close(torch.tensor(logprobs), values.flatten(), rtol=0, atol=2e-5)
    teacher.layers.close()


# ---- gradients


@pytest.mark.slow
def test_the_sampled_loss_has_the_gradient_of_the_reverse_kl_in_expectation(folder, tiny_folder, tiny_model) -> None:
    """All tokens of the vocabulary as the one that was drawn, each weighted by its probability."""
    prompt = (5, 7, 11)
    drawn = [Example(SampleId(0, 0, 0), prompt, (i,), (Span(0, 1, 0),), (0.0,), 1.0) for i in range(TINY_V)]
    drawn = drawn_by(tiny_model, drawn)
    trainer = make_trainer(tiny_model, folder, coef=3.0)
    total, kl = torch.zeros_like(gradient(trainer)), 0.0
    for e in drawn:
        before = gradient(trainer).clone()
        trainer.accumulate([e])
        probability = torch.tensor(e.logprobs[0]).exp()
        total += probability * (gradient(trainer) - before)
        kl += probability.item() * trainer.sums[SUMS.index("teacher_kl")].item()
        trainer.sums.zero_()
    theirs = distribution(folder, drawn[:1], torch.float64).detach()
    wanted = []

    def reverse_kl(ours: Tensor) -> Tensor:
        wanted.append((ours.exp() * (ours - theirs)).sum())
        return 3.0 * wanted[0]

    assert_same_gradient(total, exact(tiny_folder, tiny_model, reverse_kl, drawn[:1]), 1e-4)
    assert kl == pytest.approx(wanted[0].item(), rel=1e-4) and kl > 0.1


@pytest.mark.parametrize("part", [4096, 5])
@pytest.mark.parametrize("top_k", [TINY_V, 6])
def test_the_loss_over_the_likeliest_is_exact(folder, tiny_folder, tiny_model, examples, top_k: int, part: int) -> None:
    """Over all tokens it is the reverse KL; over few of them that of these and of one event for the others."""
    theirs = distribution(folder, examples, torch.float64).detach()

    def reverse_kl(ours: Tensor) -> Tensor:
        p, q, likely = ours.exp(), theirs.exp(), theirs.topk(top_k).indices
        if top_k < TINY_V:
            p, q = (torch.cat([x.gather(1, likely), 1 - x.gather(1, likely).sum(1, keepdim=True)], 1) for x in (p, q))
        return 2.0 * (p * (p / q).log()).sum()

    mine = gradient_of(tiny_model, drawn_by(tiny_model, examples), folder, top_k=top_k, coef=2.0, part=part)
    assert_same_gradient(mine, exact(tiny_folder, tiny_model, reverse_kl, examples), 1e-4)


@pytest.mark.parametrize("top_k", [0, 6])
def test_rewards_and_teacher_add_up(folder, tiny_model, examples, top_k: int) -> None:
    examples = drawn_by(tiny_model, examples)
    rewards = gradient_of(tiny_model, examples, folder)
    alone = gradient_of(tiny_model, examples, folder, top_k=top_k, coef=1.0)
    both = gradient_of(tiny_model, examples, folder, top_k=top_k, coef=0.5, reward_coef=3.0)
    assert (rewards - alone).norm() > 0.1 * alone.norm() > 0
    assert_same_gradient(both, 3.0 * rewards + 0.5 * alone, 1e-4)


def test_a_teacher_that_is_the_student_teaches_nothing(tiny_folder, tiny_model, examples) -> None:
    for top_k in (0, 6):
        found = gradient_of(tiny_model, drawn_by(tiny_model, examples), tiny_folder, top_k=top_k, coef=1.0)
        assert found.norm() < 1e-4
    filtered = Trainer(  # tokens that a filter leaves out have probability 0 and no gradient
        tiny_model,
        TrainerConfig(),
        LossConfig(),
        SamplingConfig(top_k=3),
        ALONE,
        MAX_RESPONSE,
        10,
        teacher=Teacher(DistillConfig(str(tiny_folder), 8), TINY_V, SamplingConfig(), CPU, torch.float32),
    )
    filtered.accumulate(examples)
    assert gradient(filtered).isfinite().all() and filtered.sums.isfinite().all()


# ---- whole runs


@pytest.fixture
def settings(settings, folder: Path, mixed_prompts: Path) -> Callable[..., list[str]]:
    own = dict(distill__teacher=folder, trainer__lr=0.01, run__steps=2, run__eval_every=0, run__dump_rollouts="true")
    own |= dict(data__train=mixed_prompts, data__eval_prompts=0, data__task=f"{ROOT}/tests/graders.py:share_of_digits")
    own |= dict(rollout__max_prompt_tokens=32, rollout__max_response_tokens=48, rollout__page_size=8)
    own |= dict(scheduler__window_iterations=4, trainer__tokens_per_microbatch=512)
    return lambda name, **more: settings(name, **own | more)


def kl_of_dump(run: Path, folder: Path, step: int) -> float:
    """Return the mean difference of log-probs to the teacher's over the sampled tokens of a step, by transformers."""
    lines = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), list[Tensor]()
    for group in map(json.loads, lines):
        for sample in group["samples"]:
            ids, spans = sample["token_ids"], [Span(*span.values()) for span in sample["spans"]]
            e = Example(SampleId(0, 0, 0), tuple(group["prompt"]["token_ids"]), ids, tuple(spans), (), 0.0)
            own = [at for span in spans for at in range(span.start, span.end)]
            with torch.no_grad():
                theirs = of_sampled(model, [e]).gather(1, torch.tensor([[ids[at]] for at in own]))[:, 0]
            found.append(torch.tensor([sample["logprobs"][at] for at in own]) - theirs)
    return torch.cat(found).mean().item()


def test_two_ranks_learn_from_a_teacher(settings, run_mains, tmp_path: Path, folder: Path) -> None:
    ended = run_mains(
        2, train.main, settings("run", distill__memory_gib=0.00075, run__steps=6, scheduler__eta_responses=1.25)
    )
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert f"teacher {folder}: {LAYERS} layers" in ended[0].out and not ended[1].out
    first, *_, last = (r["train"] for r in steps_of(tmp_path / "run"))
    assert first["teacher_kl"] == pytest.approx(kl_of_dump(tmp_path / "run", folder, 1), rel=1e-4)
    assert first["grad_norm"] > 0 and last["teacher_kl"] < first["teacher_kl"]


WAYS: dict[str, dict] = {  # of two ranks, all of them the trajectory of one
    "streams": dict(stream__policy="fixed"),
    "sharded": dict(trainer__shard=2, rollout__weights="sharded", rollout__tensor_parallel=2),
    "apart": dict(overlap__train_ranks=1),
}


@pytest.mark.thorough
def test_how_a_run_is_spread_changes_no_trajectory(settings, run_ranks, tmp_path: Path) -> None:
    both = RACES | dict(distill__reward_coef=0.5, distill__top_k=8, run__steps=3)
    train_runs(ALONE, settings("alone", **both))
    run_ranks(2, train_runs, *(settings(name, **both | way) for name, way in WAYS.items()))
    alone = trajectory(tmp_path / "alone")
    for name in WAYS:
        run = trajectory(tmp_path / name)
        assert run["tokens"] == alone["tokens"], name
        for key in ("loss", "grad_norm"):
            assert run[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), (name, key)


@pytest.mark.thorough
def test_turns_and_older_weights(settings, run_ranks, tmp_path: Path, folder: Path) -> None:
    """A teacher says something of the tokens that the model drew, in every turn, and of those of older weights."""
    turns = dict(data__env=f"{ROOT}/tests/worlds.py:chat", data__task="", env__max_turn_tokens=8)
    ahead = dict(overlap__depth=1, overlap__bound=3, rollout__stop=json.dumps([*"ABCDEFGH"]), run__steps=4)
    run_ranks(2, train_runs, settings("turns", **turns), settings("ahead", **ahead, loss__name="tis"))
    [first, _] = steps_of(tmp_path / "turns")
    assert first["train"]["teacher_kl"] == pytest.approx(kl_of_dump(tmp_path / "turns", folder, 1), rel=1e-4)
    assert max(map(int, steps_of(tmp_path / "ahead")[-1]["round"]["ages"])) > 0
    assert all(r["train"]["grad_norm"] > 0 for r in steps_of(tmp_path / "ahead"))


@pytest.mark.slow
def test_a_run_resumes_and_is_replayed(settings, tmp_path: Path) -> None:
    options = dict(run__steps=3, run__checkpoint_every=2, run__keep_checkpoints=9, trainer__updates_per_step=2)
    train_runs(ALONE, settings("straight", **options))
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000003")
    train_runs(ALONE, settings("again", **options), resume=True)
    replayed = dict(run__replay=tmp_path / "straight" / "rollouts", run__dump_rollouts="false")
    train_runs(ALONE, settings("replayed", **options | replayed))
    trained = [[r["train"] for r in steps_of(tmp_path / name)] for name in ("straight", "again", "replayed")]
    assert trained[0] == trained[1] == trained[2] and len(trained[0]) == 3


@pytest.mark.slow
def test_a_resumed_run_has_the_teacher_of_before_wherever_it_lies(settings, folder, tmp_path: Path, capsys) -> None:
    teacher = shutil.copytree(folder, tmp_path / "teacher")
    assert train.main(settings("run", distill__teacher=teacher, run__steps=1)) == 0
    moved = teacher.rename(tmp_path / "moved")
    again = partial(settings, "run", distill__teacher=moved)
    assert train.main([*again(run__steps=2), "--resume"]) == 0
    weights = safetensors.torch.load_file(moved / "model.safetensors")
    changed = {name: weight + 0.5 for name, weight in weights.items()}
    safetensors.torch.save_file(changed, moved / "model.safetensors", {"format": "pt"})
    assert train.main([*again(run__steps=3), "--resume"]) == 2
    assert "distill.teacher = " in (said := capsys.readouterr().err) and "has other weights than when" in said
    assert train.main([*settings("run", distill__teacher="", run__steps=3), "--resume"]) == 2


# ---- settings


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (dict(distill__teacher="", distill__top_k=3), ("[distill] has no effect", "distill.teacher")),
        (dict(distill__teacher="nowhere"), ("distill.teacher", "nowhere")),
        (dict(distill__top_k=259), ("distill.top_k = 259", "258")),
        (dict(distill__coef=0), ("distill.coef = 0.0", "more than 0")),
        (dict(distill__memory_gib=1e-6), ("distill.memory_gib", "trainer.tokens_per_microbatch")),
        (dict(rollout__max_response_tokens=240), ("context",)),
        (dict(loss__advantage="grpo"), ("loss.advantage = grpo", "reward_coef = 0")),
        (dict(loss__name="sft", run__replay="."), ("loss.name = sft", "distill.teacher")),
        (dict(scheduler__dynamic_sampling="true"), ("dynamic_sampling", "reward_coef = 0")),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, capsys, given: dict, parts: tuple[str, ...]) -> None:
    assert train.main([*settings("run", **given), "--check"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and all(part in text for part in parts), text


@pytest.mark.slow
def test_other_tokens_are_refused(settings, tiny_folder, folder, tmp_path, capsys) -> None:
    swapped = shutil.copytree(folder, tmp_path / "swapped")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    a, b = (token for token, i in tokens["model"]["vocab"].items() if i in (40, 41))
    vocab = tokens["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (swapped / "tokenizer.json").write_text(json.dumps(tokens))
    assert train.main([*settings("run", distill__teacher=swapped), "--check"]) == 2
    assert "has other tokens than the student" in capsys.readouterr().err
    small = tiny("qwen3", tmp_path / "small", tiny_folder, vocab_size=200)
    assert train.main([*settings("run", distill__teacher=small), "--check"]) == 2
    assert "logits for 200 tokens, the student draws from 258" in capsys.readouterr().err
    judge = tiny("qwen2", tmp_path / "judge", tiny_folder, labels=1)
    assert train.main([*settings("run", distill__teacher=judge), "--check"]) == 2
    assert "distill.teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_the_plan_counts_the_teacher(settings, capsys) -> None:
    gpu = dict(run__device="cuda", run__device_gib=8, rollout__page_size=16)
    assert train.main([*settings("run", **gpu), "--check"]) == 0
    streamed = capsys.readouterr().out
    assert train.main([*settings("run", **gpu, distill__memory_gib=0.25), "--check"]) == 0
    kept = capsys.readouterr().out
    assert [line.split()[-1] for line in kept.splitlines() if line.startswith("  teacher")] == ["0.250"]
    assert "  teacher" in streamed
