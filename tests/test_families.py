"""Families that do more than the plain decoder: what the engine decodes equals one full forward, whatever it does."""

import json
import math
import shutil
from collections import abc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, ROOT, steps_of, thorough, train_runs
from test_drafts import Foresight, assert_same
from test_model import make_oracle
from test_rollout import CPU, full_logits, generate, kinds, make_engine, make_sequences
from torch import Tensor
from transformers import AutoModelForCausalLM

from attention import PackedAttention
from checkpoint import list_checkpoints, load_model, save_model
from core import Example, ModelShape
from engine import experts
from loss import LossConfig
from model import Model, parse_shape
from parallel import World
from rollout import Engine
from sampling import SamplingConfig, score
from trainer import Trainer, TrainerConfig

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral, window of one": {"model_type": "mistral", "sliding_window": 1},
    "some layers have windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 11},
    "mixture": {"model_type": "qwen3_moe", "head_dim": 16} | MIXTURE,
}


def random_model(name: str) -> Model:
    model = Model(parse_shape(SMALL | FAMILIES[name], name))
    generator = torch.Generator().manual_seed(3)
    for key, tensor, _ in model.hf_tensors():
        if not key.endswith("norm.weight"):
            tensor.normal_(0.0, 0.3, generator=generator)
    return model


def make_trainer(model: Model) -> Trainer:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    return Trainer(model, TrainerConfig(), config, SamplingConfig(), World(0, 1, CPU), 64, 10)


def choices(model: Model, ids: list[int], forced: list[list[list[int]]] | None = None) -> list[list[list[int]]]:
    """Return which experts each token would take in each layer, in one forward over all that takes the `forced`."""
    found = []

    def choose(layer: int, chosen: Tensor) -> Tensor:
        found.append(chosen.sort(-1).values)
        return torch.tensor(forced)[:, layer] if forced else chosen

    with torch.no_grad():
        model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([len(ids)], CPU), choose=choose)
    return torch.stack(found, 1).tolist()


def taken(experts: abc.Sequence[int], shape: ModelShape) -> list[list[list[int]]]:
    return torch.tensor(list(experts)).view(-1, shape.num_layers, shape.experts_per_token).sort(-1).values.tolist()


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("name", [thorough(f) if f in ("phi3", "mistral, window of one") else f for f in FAMILIES])
@pytest.mark.parametrize("num_pages", [thorough(2000), 22])
def test_decoding_reads_what_a_full_forward_reads(name: str, num_pages: int, kind: type[Engine]) -> None:
    """In chunks of prefill, with preemption, and with drafts."""
    model, count = random_model(name), 8
    settings = {"kind": kind, "num_pages": num_pages, "step_tokens": 16}
    engine = make_engine(model, **settings)
    samples = generate(engine, make_sequences(count, seed=3))
    assert (engine.stats.preemptions > 0) == (num_pages == 22)
    for s in make_sequences(count, seed=3):
        done = samples[s.id]
        logits = full_logits(model, [*s.prompt_ids, *done.token_ids])[len(s.prompt_ids) - 1 : -1]
        expected, _ = score(logits, torch.tensor(done.token_ids), SamplingConfig())
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=2e-5)
        assert expected.std() > 0.1
        if model.shape.num_experts:
            assert taken(done.experts, model.shape) == choices(model, [*s.prompt_ids, *done.token_ids][:-1])
    engine = make_engine(model, **settings)
    engine.drafter = Foresight(samples, right=0.8)
    drafted = generate(engine, make_sequences(count, seed=3))
    assert_same(drafted, samples, 2e-5)
    assert engine.drafter.accepted > 0
    assert [drafted[id].experts for id in samples] == [s.experts for s in samples.values()]
    if not model.shape.windows:
        return
    plain = Model(replace(model.shape, windows=()))
    plain.load_state_dict(model.state_dict())
    ids = list(range(40))
    assert (full_logits(plain, ids) - full_logits(model, ids)).abs().max() > 0.1, "the window shows"


# ---- mixtures: the rollout's choices in training


def only(gate, allowed: Tensor):
    """Return the forward of transformers' router that may choose among `allowed` [T, E] only."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        weights, chosen = logits.masked_fill(~allowed, -torch.inf).softmax(-1).topk(gate.top_k, -1)
        return logits, weights, chosen

    return forward


def test_graphs_hold_mixtures_only_where_their_products_do_not_wait(monkeypatch) -> None:
    gpu, capability = torch.device("cuda"), [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    assert not experts.waits(torch.bfloat16, gpu) and experts.waits(torch.float32, gpu)
    capability[:] = 8, 6
    assert experts.waits(torch.bfloat16, gpu) and not experts.waits(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("replays", [True, False])
def test_training_takes_the_experts_that_the_rollout_took(replays: bool, tmp_path) -> None:
    """Routers have changed since. Log-probs and gradients are those of a model that has no choice."""
    config = SMALL | FAMILIES["mixture"]
    oracle = make_oracle(config, tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    [sequence] = make_sequences(1, seed=5)
    sample = generate(make_engine(model, replay_experts=replays), [sequence])[sequence.id]
    assert bool(sample.experts) == replays
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(model.layers, oracle.model.layers, strict=True):
            noise = torch.randn(ours.router.weight.shape, generator=generator) * 0.3
            ours.router.weight += noise
            theirs.mlp.gate.weight += noise
    ids = torch.tensor([*sequence.prompt_ids, *sample.token_ids])
    recorded = taken(sample.experts, model.shape)
    now = choices(model, ids.tolist())
    for i, layer in enumerate(oracle.model.layers if replays else ()):
        allowed = torch.zeros(len(ids), model.shape.num_experts, dtype=torch.bool)
        allowed.scatter_(1, torch.tensor([token[i] for token in [*recorded, now[-1]]]), True)
        layer.mlp.gate.forward = only(layer.mlp.gate, allowed)
    example = Example(
        sample.id, sequence.prompt_ids, sample.token_ids, sample.spans, sample.logprobs, 1.0, experts=sample.experts
    )
    trainer = make_trainer(model)
    trainer.accumulate([example])
    scored = oracle(ids[None], use_cache=False).logits[0, len(sequence.prompt_ids) - 1 : -1].log_softmax(-1)
    logprobs = scored.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
    (-ratio.clamp(0.8, 1.28).minimum(ratio)).sum().backward()
    for ours, theirs in zip(model.layers, oracle.model.layers, strict=True):
        for mine, wanted in (
            (ours.router.weight.grad, theirs.mlp.gate.weight.grad),
            (ours.gate_up_proj.weight.grad, theirs.mlp.experts.gate_up_proj.grad),
            (ours.down_proj.weight.grad, theirs.mlp.experts.down_proj.grad),
        ):
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=2e-5 * wanted.abs().max().item())
    would = choices(model, ids.tolist(), [*recorded, now[-1]] if replays else None)
    same = [mine == its for token, other in zip(recorded, would) for mine, its in zip(token, other, strict=True)]
    stats = trainer.update()
    assert 1 < stats["expert_load"] <= stats["expert_load_max"] <= model.shape.num_experts
    assert stats["experts_same"] == pytest.approx(sum(same) / len(same) if replays else math.nan, nan_ok=True)
    assert not replays or 0 < stats["experts_same"] < 1


@pytest.fixture
def mixture_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model's folder, but for a mixture of experts with random weights."""
    config = (
        json.loads((tiny_folder / "config.json").read_text()) | {"model_type": "qwen3_moe", "head_dim": 8} | MIXTURE
    )
    (source := tmp_path / "source").mkdir()
    for path in tiny_folder.glob("*.json"):
        (source / path.name).write_text(path.read_text())
    (source / "config.json").write_text(json.dumps(config))
    model = Model(parse_shape(config, "mixture"))
    generator = torch.Generator().manual_seed(1)
    for key, tensor, _ in model.hf_tensors():
        tensor.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    save_model(tmp_path / "mixture", model, source)
    return tmp_path / "mixture"


@pytest.mark.slow
def test_a_mixture_trains_alike_on_any_ranks(settings, run_ranks, mixture_folder, mixed_prompts, tmp_path) -> None:
    changes = dict(run__steps=3, model__path=mixture_folder, data__task=f"{ROOT}/tests/graders.py:share_of_digits")
    changes |= dict(scheduler__eta_responses=1.5, data__eval_prompts=0, run__checkpoint_every=2)
    changes |= dict(data__train=mixed_prompts, rollout__max_prompt_tokens=32)
    split = dict(rollout__tensor_parallel=2, trainer__shard=2, rollout__weights="sharded")
    ahead = dict(overlap__depth=1, overlap__bound=2, overlap__clock="steps", scheduler__eta_responses=1)
    train_runs(ALONE, settings("one", **changes), settings("ahead", **changes | ahead))
    run_ranks(2, train_runs, settings("two", **changes), settings("split", **changes | split))
    alone = steps_of(tmp_path / "one")
    assert all(record["train"]["grad_norm"] > 1e-2 for record in alone)
    for name in ("two", "split"):
        for mine, theirs in zip(alone, steps_of(tmp_path / name), strict=True):
            assert mine["train"]["experts_same"] == theirs["train"]["experts_same"] == 1
            assert mine["train"]["expert_load"] == pytest.approx(theirs["train"]["expert_load"])
            for key in ("loss", "grad_norm", "entropy"):
                assert mine["train"][key] == pytest.approx(theirs["train"][key], abs=1e-5)
    assert all(0.5 < record["train"]["experts_same"] <= 1 for record in steps_of(tmp_path / "ahead"))
    resumed = settings("ahead", **changes | ahead | dict(run__steps=3))
    straight = [record["train"]["loss"] for record in steps_of(tmp_path / "ahead")]
    for newest in list_checkpoints(tmp_path / "ahead")[1:]:
        shutil.rmtree(newest)
    train_runs(ALONE, resumed, resume=True)
    assert [record["train"]["loss"] for record in steps_of(tmp_path / "ahead")] == straight
    folder = list_checkpoints(tmp_path / "split")[-1]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(range(30))
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(full_logits(load_model(folder, CPU, torch.float32), ids), wanted, rtol=0, atol=1e-4)
