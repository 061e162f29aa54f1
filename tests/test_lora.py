"""LoRA: gradients, merges and files as PEFT has them, however the run is spread, and nothing else is trained."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import ALONE, ROOT, steps_of, thorough, train_runs
from safetensors.torch import load_file, save_file
from test_golden import trajectory
from test_job import train_all
from torch import Tensor
from transformers import AutoModelForCausalLM

import train
from checkpoint import check_model, fill, load_model, save_model
from config import ConfigError
from core import Example, SampleId, Span
from loss import LossConfig
from model import FAMILIES, Model, empty_model, parse_shape
from parallel import World
from sampling import SamplingConfig
from trainer import Trainer, TrainerConfig
from weights.lora import Adapters, LoraConfig, check_lora, count

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)
FEW = replace(LORA, targets=("q_proj", "v_proj", "up_proj"))


def make_examples() -> list[Example]:
    rng = Random(0)

    def ids(longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 258) for _ in range(rng.randint(1, longest)))

    pairs = [(ids(12), ids(30)) for _ in range(7)]
    spans = [(Span(0, len(response), 0),) for _, response in pairs]
    return [Example(SampleId(0, 0, 0), *pair, span, (), 1.0) for pair, span in zip(pairs, spans, strict=True)]


def make_trainer(model: Model, lora: LoraConfig = LORA, world: World = ALONE, **settings) -> Trainer:
    """Return a trainer of supervised losses. B of each adapter is random: at the zeros of a start A learns nothing."""
    keeps_model, reference = settings.pop("keeps_model", True), settings.pop("reference", None)
    config = TrainerConfig(**{"lr": 1e-2, "lr_warmup_updates": 0, "grad_clip": 0.0, "lora": lora, **settings})
    trainer = Trainer(model, config, LossConfig("sft"), SamplingConfig(), world, 30, 10, reference, keeps_model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in trainer.adapters.tensors.items():
            if "lora_B" in name:
                tensor.normal_(0.0, 0.1, generator=generator)
    return trainer


def merged(trainer: Trainer) -> Trainer:
    with trainer._optimizer_state():  # and what is beside it in host memory
        trainer._follow()
    return trainer


def theirs(folder: Path, trainer: Trainer, at: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return PEFT's model with adapters that it reads from our files."""
    from peft import PeftModel

    tensors, others = trainer.adapters.files(folder)
    (at / "adapter").mkdir()
    for name, content in others.items():
        (at / name).write_bytes(content)
    for name, content in tensors.items():
        save_file({key: t.contiguous() for key, t in content.items()}, at / name)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return PeftModel.from_pretrained(base, at / "adapter", is_trainable=True)


def loss_of(model: torch.nn.Module, examples: list[Example]) -> Tensor:
    total = torch.zeros(())
    for e in examples:
        ids = torch.tensor([[*e.prompt_ids, *e.token_ids]])
        logprobs = model(ids).logits[0].log_softmax(-1)[len(e.prompt_ids) - 1 : -1]
        total = total - logprobs.gather(1, torch.tensor(e.token_ids)[:, None]).sum()
    return total


@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("lora", [LORA, FEW], ids=["all", "few"])
def test_gradients_and_logits_are_those_of_adapters_beside_the_weights(
    tiny_folder, tiny_model, tmp_path, lora: LoraConfig, recompute: str
) -> None:
    trainer, examples = merged(make_trainer(tiny_model, lora, recompute=recompute)), make_examples()
    trainer.accumulate(examples)
    peft = theirs(tiny_folder, trainer, tmp_path)
    loss = loss_of(peft, examples)
    loss.backward()
    assert trainer.sums[0].item() == pytest.approx(loss.item(), rel=1e-5)
    named = {n.replace(".default", "").removeprefix("base_model.model."): p for n, p in peft.named_parameters()}
    wanted: dict[str, Any] = {n: p.grad for n, p in named.items() if p.requires_grad}
    assert wanted.keys() == trainer.adapters.tensors.keys()
    for name, tensor in trainer.adapters.tensors.items():
        assert wanted[name].norm() > 1e-3
        torch.testing.assert_close(tensor.grad, wanted[name], rtol=1e-4, atol=1e-4)
    for name, tensor in peft.merge_and_unload().state_dict().items():
        if name != "lm_head.weight":
            torch.testing.assert_close(tiny_model.export()[name], tensor, rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_merged_weight_led_back_to_its_factors(tiny_folder, tiny_model) -> None:
    """W = W0 + s B A, so dA = s B^T dW and dB = s dW A^T; here with dW in full."""
    trainer, examples = merged(make_trainer(tiny_model)), make_examples()
    trainer.accumulate(examples)
    plain = Trainer(
        copy.deepcopy(tiny_model).requires_grad_(), TrainerConfig(), LossConfig("sft"), SamplingConfig(), ALONE, 30, 10
    )
    for layer in plain.model.layers:
        layer.adapted = {}
    plain.accumulate(examples)
    dense = Model(tiny_model.shape)  # holds gradients where weights belong
    for place, master in zip(dense.parameters(), plain.masters, strict=True):
        place.data.copy_(master.grad)
    whole, tensors = dense.export(), trainer.adapters.tensors
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        a, b, gradient = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"], whole[f"{name}.weight"]
        torch.testing.assert_close(a.grad, 2.0 * b.T @ gradient, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.grad, 2.0 * gradient @ a.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_targets_change_and_nothing_drifts(tiny_model, dtype: torch.dtype) -> None:
    model = tiny_model.to(dtype)
    start = {name: weight.clone() for name, weight in model.export().items()}
    trainer, examples = make_trainer(model, FEW), make_examples()
    for _ in range(20):
        trainer.accumulate(examples)
        assert trainer.update()["skipped"] == ""
    now = model.export()
    for name, weight in start.items():
        assert torch.equal(now[name], weight) == (name.split(".")[-2] not in FEW.targets or "bias" in name), name
    for name, tensor in trainer.adapters.tensors.items():
        tensor.data.mul_("lora_A" in name)
    trainer._follow()
    assert all(torch.equal(model.export()[name], weight) for name, weight in start.items())


def test_small_updates_are_in_the_weights_of_bfloat16_on_the_average(tiny_model) -> None:
    model = tiny_model.to(torch.bfloat16)
    start = {id(weight): weight.detach().float() for weight in model.parameters()}
    trainer, pairs = make_trainer(model), list[tuple[Tensor, Tensor]]()
    for name, tensor in trainer.adapters.tensors.items():
        tensor.data.mul_(1.0 if "lora_A" in name else 1e-3)  # most of B A is far less than half a step
    merged(trainer)
    for adapted in trainer.adapters.adapted:
        base = start[id(adapted.weight)]
        exact = replace(adapted, weight=torch.empty_like(base), base=base)
        exact.merge()
        pairs.append(((exact.weight - base).flatten(), (adapted.weight.detach().float() - base).flatten()))
    wanted, real = map(torch.cat, zip(*pairs))
    assert (real == 0).float().mean() > 0.8, "else rounding to nearest would do"
    assert (wanted @ real / (wanted @ wanted)).item() == pytest.approx(1.0, abs=0.1)


def test_a_reference_serves_as_the_weights_without_adapters(tiny_folder, tiny_model) -> None:
    found = []
    for reference in (None, load_model(tiny_folder, CPU, torch.float32).requires_grad_(False)):
        trainer = merged(make_trainer(copy.deepcopy(tiny_model), reference=reference))
        found.append(trainer.model.export())
        assert bool(trainer.adapters.copies) == (reference is None)
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


def update_share(world: World, folder: Path, result: Path, settings: dict) -> None:
    """Two updates on uneven shares; the device is released between gradients and update."""
    if settings.get("keeps_model", True):
        trainer = make_trainer(load_model(folder, CPU, torch.float32), world=world, **settings)
    else:
        shape, files = check_model(folder)
        trainer = make_trainer(empty_model(shape), world=world, **settings)
        fill(trainer.model, files)
        trainer.start_from_model()
    merged(trainer)
    gradients, stats, examples = [], [], make_examples()
    step = trainer._step
    trainer._step = lambda lr: (gradients.append([g.clone() for g in trainer.gradients]), step(lr))
    for update in range(2):
        owner = [i % max(world.size - 1 + update, 1) for i in range(len(examples))]
        trainer.accumulate([e for e, rank in zip(examples, owner, strict=True) if rank == world.rank])
        trainer.release()
        assert not any(t.untyped_storage().nbytes() for t in (*trainer.trained, *trainer.gradients))
        trainer.take_back()
        stats.append(trainer.update())
    whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in trainer.params]
    torch.save((gradients, [*trainer.adapters.tensors.values()], whole, stats), f"{result}.{world.rank}")


SHARDED = {"shard": 2, "recompute": "on", "offload_optimizer": True, "tokens_per_microbatch": 64}


@pytest.mark.parametrize(
    "size, settings",
    [
        (2, {}),
        (4, SHARDED | {"keeps_model": False, "lora": FEW}),
        thorough(2, SHARDED),
        thorough(4, SHARDED),
    ],
)
def test_any_number_of_ranks_makes_the_same_update(run_ranks, tiny_folder, tmp_path, size: int, settings: dict) -> None:
    update_share(ALONE, tiny_folder, tmp_path / "alone", {name: settings[name] for name in settings if name == "lora"})
    expected = torch.load(tmp_path / "alone.0")
    run_ranks(size, update_share, tiny_folder, tmp_path / "rank", settings)
    ranks = [torch.load(tmp_path / f"rank.{i}") for i in range(size)]
    for gradients, adapters, weights, stats in ranks:
        for mine, wanted in zip(sum(gradients, []), sum(expected[0], []), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, adapters, ranks[0][1])) and all(map(torch.equal, weights, ranks[0][2]))
        for mine, wanted in zip([*adapters, *weights], [*expected[1], *expected[2]], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-4)
        assert [s["grad_norm"] for s in stats] == pytest.approx([s["grad_norm"] for s in expected[3]], rel=1e-4)


# ---- whole runs --------------------------------------------------------------------------------------------------

RACES = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5)
WAYS: dict[str, dict] = {  # of two ranks, all of them the trajectory of one
    "streams": dict(stream__policy="fixed"),
    "sharded": dict(trainer__shard=2),
    "sharded rollout": dict(trainer__shard=2, rollout__weights="sharded", rollout__tensor_parallel=2),
    "tensor parallel": dict(rollout__tensor_parallel=2, trainer__offload_optimizer="true"),
    "elastic": dict(planner__rule="paper", rollout__kv_gib=0.001),
    "apart": dict(overlap__train_ranks=1),
}


@pytest.fixture
def settings(settings, mixed_prompts: Path) -> Callable[..., list[str]]:
    lora: dict[str, Any] = dict(
        trainer__lora__rank=4, trainer__lora__alpha=8, trainer__lr=0.03, run__steps=3, run__eval_every=0
    )
    lora |= dict(run__dump_rollouts="true", data__train=mixed_prompts, data__eval_prompts=0)
    lora |= dict(data__task=f"{ROOT}/tests/graders.py:share_of_digits", scheduler__window_iterations=4)
    lora |= dict(rollout__max_prompt_tokens=32, rollout__max_response_tokens=48, rollout__page_size=8)
    return lambda name, **more: settings(name, **lora | more)


@pytest.mark.thorough
def test_how_a_run_is_spread_changes_no_trajectory(settings, run_ranks, tmp_path: Path) -> None:
    train_runs(ALONE, settings("alone", **RACES))
    run_ranks(2, train_all, [(settings(name, **RACES | way), name == "sharded") for name, way in WAYS.items()])
    alone = trajectory(tmp_path / "alone")
    assert min(alone["grad_norm"]) > 0 and len(set(alone["tokens"])) == 3
    for name in WAYS:
        run = trajectory(tmp_path / name)
        assert run["tokens"] == alone["tokens"], name
        for key in ("loss", "grad_norm"):
            assert run[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), (name, key)


@pytest.mark.thorough
def test_a_rollout_that_runs_ahead_gets_the_merged_weights(settings, run_ranks, tmp_path: Path) -> None:
    ahead = dict(overlap__depth=1, overlap__bound=3, rollout__stop=json.dumps([*"ABCDEFGH"]), run__steps=4)
    run_ranks(2, train_runs, settings("both", **ahead), settings("apart", **ahead, overlap__train_ranks=1))
    for name in ("both", "apart"):
        trained = [r["train"] for r in steps_of(tmp_path / name)]
        differences = [t["logprob_diff_max"] for t in trained if t["logprob_diff_max"] is not None]
        assert len(trained) == 4 and min(t["grad_norm"] for t in trained) > 0
        assert differences and max(differences) < 1e-4, "rollout and trainer disagree"
    assert any(r["sync"] for r in steps_of(tmp_path / "apart"))


def test_a_run_resumes_to_the_same_trajectory_and_is_read_by_others(settings, run_ranks, tiny_folder, tmp_path) -> None:
    options = RACES | dict(run__steps=4, run__checkpoint_every=2, run__keep_checkpoints=9, loss__kl_coef=0.01)
    train_runs(ALONE, settings("straight", **options))
    straight, again, spread = (tmp_path / name for name in ("straight", "again", "spread"))
    for run in (again, spread):
        shutil.copytree(straight, run)
        shutil.rmtree(run / "checkpoints" / "step_000004")
    train_runs(ALONE, settings("again", **options), resume=True)
    sharded = settings("spread", **options, trainer__shard=2, rollout__weights="sharded")
    run_ranks(2, partial(train_runs, resume=True), sharded)
    assert len(steps_of(again)) == len(steps_of(spread)) == 4
    assert trajectory(again) == trajectory(straight)
    assert trajectory(spread)["tokens"] == trajectory(straight)["tokens"]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "optimizer/shard-00000.safetensors"):
        ours, expected = (run / "checkpoints" / "step_000004" / file for run in (again, straight))
        assert ours.read_bytes() == expected.read_bytes()
    folder = straight / "checkpoints" / "step_000004"
    whole, base = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(tiny_folder)
    from peft import PeftModel

    with_adapters, ids = PeftModel.from_pretrained(base, folder / "adapter"), torch.arange(2, 40)[None]
    torch.testing.assert_close(with_adapters(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole.lm_head(torch.ones(32)), whole(ids).logits[0, -1])
    found = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(tensor.any() and tensor.dtype == torch.float32 for tensor in found.values())


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (dict(trainer__lora__rank=-1), ("trainer.lora.rank = -1", "at least 0")),
        (dict(trainer__lora__rank=0), ("trainer.lora has no effect", "give a rank")),
        (dict(trainer__lora__rank=10**5), ("trainer.lora.rank = 100000", "no targeted weight", "take less")),
        (dict(trainer__lora__targets="lm_head"), ("'lm_head' is no projection", "down_proj, gate_proj", "or all")),
        (dict(trainer__lora__targets='["q_proj", "qproj"]'), ("'qproj'", "q_proj, up_proj, v_proj")),
        (dict(trainer__lora__targets="q_proj,down_proj"), ("""'--trainer.lora.targets=["q_proj", "down_proj"]'""",)),
        (dict(drafts__sources="old, own"), ("""'--drafts.sources=["old", "own"]'""",)),
        (dict(trainer__lora__targets="[]"), ("trainer.lora.targets is empty",)),
        (dict(trainer__lora=8), ("trainer.lora is a section", "trainer.lora.rank")),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, capsys, given: dict, parts: tuple[str, ...]) -> None:
    assert train.main(settings("run", **given)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and all(part in text for part in parts), text


@pytest.mark.slow
def test_a_run_goes_on_with_its_adapters_only(settings, capsys) -> None:
    assert train.main(settings("run", run__steps=1)) == 0
    assert train.main([*settings("run", run__steps=1, trainer__lora__rank=8), "--resume"]) == 2
    assert "trainer.lora.rank is 8 now and was 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, dict(trainer__lora__rank=0, trainer__lora__alpha=32.0, loss__kl_coef=0.1)])
def test_a_run_goes_on_from_the_same_weights_only(settings, tiny_folder, tmp_path, capsys, given: dict) -> None:
    shutil.copytree(tiny_folder, tmp_path / "base")
    options = settings("run", model__path=tmp_path / "base", run__steps=1, **given)
    assert train.main(options) == 0 == train.main([*options, "--resume"])
    model = load_model(tiny_folder, CPU, torch.float32)
    with torch.no_grad():
        model.layers[1].down_proj.weight.mul_(1.01)
    save_model(tmp_path / "base", model, tiny_folder)
    capsys.readouterr()
    assert train.main([*options, "--resume"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "base' has other weights than when" in text, text


@pytest.mark.slow
def test_the_warm_start_trains_everything_before_the_adapters_begin(settings, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("job.MODELS", tmp_path)
    small = dict(model__path="", data__train="hailstone", data__task="", run__steps=1)
    monkeypatch.setattr("job.group_advantages", lambda groups, *_: torch.ones(len(groups), len(groups[0].rewards)))
    small |= dict(warm_start__steps=2, warm_start__hidden_size=32, warm_start__num_layers=1)
    train_runs(ALONE, settings("run", **small))
    [start] = [path for path in tmp_path.glob("hailstone-*") if path.is_dir()]
    ours, base = (load_file(f / "model.safetensors") for f in (start, tmp_path / "run/checkpoints/step_000001"))
    changed = {name.split(".")[-2] for name in base if not torch.equal(ours[name], base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_numbers_that_there_are(family: str) -> None:
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=16)
    sizes |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24) if family == "qwen3_moe" else {}
    shape = parse_shape({"model_type": family, **sizes}, "test")
    model = Model(shape)
    if shape.stored_joined:
        with pytest.raises(ConfigError, match="joins q|k|v"):
            check_lora(LORA, shape)
        return
    few = replace(FEW, targets=("q_proj", "v_proj")) if shape.num_experts else FEW  # experts have none
    for lora in (LORA, few):
        check_lora(lora, shape)
        adapters = Adapters(model, lora)
        sizes_of = [adapted.weight.numel() for adapted in adapters.adapted]
        wanted = sum(t.numel() for t in adapters.tensors.values()), sum(sizes_of), max(sizes_of)
        assert tuple(count(lora, shape).values()) == wanted
    with pytest.raises(ConfigError, match="embed_tokens"):
        check_lora(replace(LORA, targets=("embed_tokens",)), shape)
    if shape.num_experts:
        with pytest.raises(ConfigError, match="'up_proj' is no projection .* k_proj, o_proj, q_proj, v_proj"):
            check_lora(FEW, shape)
