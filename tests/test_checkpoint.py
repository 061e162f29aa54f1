"""Hugging Face folders in and out, and checkpoints that are whole at any moment."""

import copy
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ALONE, thorough
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import parallel
import train
from attention import PackedAttention
from checkpoint import (
    CHECKSUMS,
    INDEX,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Checkpoints,
    _Writer,
    check_model,
    damage,
    eos_ids,
    list_checkpoints,
    load_model,
    load_state,
    load_tensors,
    load_tokenizer,
    save_model,
)
from config import ConfigError
from engine.host import OnHost
from job import newest_checkpoint
from model import Model
from parallel import World
from policies.step_times import PROFILE_NAME
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
PROMPT = [2, 30, 17, 99, 4]


def load(folder: Path) -> Model:
    return load_model(folder, CPU, torch.float32)


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    return model.export()


def assert_bit_equal(first: Model, second: Model) -> None:
    one, two = weights_of(first), weights_of(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture
def random_model(tiny_model: Model) -> Model:
    """Weights unlike those of the folder it was loaded from, norms and biases too."""
    torch.manual_seed(5)
    for tensor in tiny_model.parameters():
        tensor.data.normal_(0.0, 0.3)
    return tiny_model


# ---- Hugging Face folders in


def test_shards_of_transformers_load_as_the_single_file_does(folder, tmp_path):
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    oracle.save_pretrained(tmp_path / "one")
    oracle.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "one" / WEIGHTS).exists() and not (tmp_path / "many" / WEIGHTS).exists()
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert_bit_equal(load(tmp_path / "one"), load(folder))
    assert_bit_equal(load(tmp_path / "many"), load(folder))


def test_weights_are_converted_to_the_dtype_asked_for(folder):
    exact, rough = weights_of(load(folder)), weights_of(load_model(folder, CPU, torch.bfloat16))
    assert all(torch.equal(rough[name], exact[name].bfloat16()) for name in exact)


def test_tensors_that_the_decoder_does_not_have_are_ignored(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / WEIGHTS)
    assert_bit_equal(load(folder), load(folder))


def test_names_of_a_bare_decoder_load_as_those_of_a_whole_model(folder, tmp_path):
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    oracle.model.save_pretrained(tmp_path / "bare")
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / WEIGHTS)
    assert_bit_equal(load(tmp_path / "bare"), load(folder))


def tied_and_not(tensors: dict) -> dict[str, dict]:
    embed, head = tensors["model.embed_tokens.weight"], torch.randn(tensors["model.embed_tokens.weight"].shape)
    only = {name: tensor for name, tensor in tensors.items() if name != "model.embed_tokens.weight"}
    return {
        "an equal head": tensors | {"lm_head.weight": embed.clone()},
        "another head": tensors | {"lm_head.weight": head},
        "another head in bf16": tensors | {"lm_head.weight": head.bfloat16()},
        "only a head": only | {"lm_head.weight": head},
    }


@pytest.mark.parametrize("name", ["an equal head", "another head", "another head in bf16", "only a head"])
@torch.no_grad()
def test_a_head_beside_tied_embeddings_is_used_as_transformers_does(name, folder, tmp_path):
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    save_file(tied_and_not(load_file(folder / WEIGHTS))[name], folder / WEIGHTS)
    model, ids = load(folder), torch.tensor(PROMPT)
    assert (model.head is None) == ("another" not in name)
    save_model(tmp_path / "saved", model, folder)  # and it stays so in a checkpoint
    assert_bit_equal(load(tmp_path / "saved"), model)
    for place in (folder, tmp_path / "saved"):
        theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        ours = model.logits(model(ids, torch.arange(len(ids)), PackedAttention([len(ids)], CPU)))
        torch.testing.assert_close(ours, theirs(ids[None]).logits[0], atol=1e-4, rtol=0)


# ---- Hugging Face folders out


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
def test_save_and_load_is_bit_equal(random_model, folder, tmp_path, max_shard_bytes, monkeypatch):
    monkeypatch.setattr("checkpoint.SHARD_BYTES", max_shard_bytes)
    save_model(tmp_path / "out", random_model, folder)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 2**30) == (not (tmp_path / "out" / INDEX).exists())
    assert sum(len(load_file(path)) for path in files) == len(weights_of(random_model))  # each tensor in one file
    assert_bit_equal(load(tmp_path / "out"), random_model)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
@torch.no_grad()
def test_transformers_computes_and_generates_the_same_from_an_exported_folder(
    random_model, tiny_folder, tmp_path, max_shard_bytes, monkeypatch
):
    monkeypatch.setattr("checkpoint.SHARD_BYTES", max_shard_bytes)
    save_model(tmp_path, random_model, tiny_folder)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path).decode(PROMPT) == load_tokenizer(tiny_folder).decode(PROMPT)

    ids = list(PROMPT)
    for _ in range(20):
        hidden = random_model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([len(ids)], CPU))
        logits = random_model.logits(hidden)
        ids.append(int(logits[-1].argmax()))
    torch.testing.assert_close(logits, theirs(torch.tensor([ids[:-1]])).logits[0], atol=1e-4, rtol=0)
    assert len(set(ids[len(PROMPT) :])) > 2  # not one token for ever
    generated = theirs.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, eos_token_id=-1)
    assert generated[0].tolist() == ids


@pytest.mark.slow
def test_a_sharded_qwen3_is_trained_and_goes_back_in_shards(settings, tiny_folder, tmp_path, monkeypatch):
    source = Path(shutil.copytree(tiny_folder, tmp_path / "qwen3"))
    (source / WEIGHTS).unlink()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 258}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen3Config(**sizes, **heads, initializer_range=0.3, eos_token_id=0, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(source, max_shard_size="20KB")
    rows = [{"prompt": str(i), "answer": ""} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("checkpoint.SHARD_BYTES", 20_000)
    options = {"model__path": source, "data__train": tmp_path / "data.jsonl", "data__eval_prompts": 0, "run__steps": 1}
    grader = f"{ROOT}/tests/graders.py:share_of_digits"
    assert train.main(settings(**options, data__task=grader, trainer__lr_warmup_updates=0)) == 0

    [folder] = list_checkpoints(tmp_path / "run")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    needed = {INDEX, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert needed <= {path.name for path in folder.iterdir()}
    before, ours = weights_of(load(source)), load(folder)
    assert all(
        not torch.equal(before[name], tensor) for name, tensor in weights_of(ours).items() if "embed" not in name
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.config.model_type == "qwen3"
    limits = RolloutConfig(max_prompt_tokens=8, max_response_tokens=20, kv_gib=0.001)
    [[sample]] = Engine(ours, limits, SamplingConfig(temperature=0), []).generate([PROMPT], max_new_tokens=20)
    expected = theirs.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, eos_token_id=-1)
    assert [*PROMPT, *sample.token_ids] == expected[0].tolist() and len(set(sample.token_ids)) > 2
    assert AutoTokenizer.from_pretrained(folder).decode(PROMPT) == load_tokenizer(source).decode(PROMPT)


def test_an_export_names_the_dtype_of_its_weights(tiny_folder, tmp_path):
    save_model(tmp_path, load_model(tiny_folder, CPU, torch.bfloat16), tiny_folder)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}


def test_weights_that_are_away_from_the_device_are_written_from_host_memory(tiny_model, tiny_folder, tmp_path) -> None:
    """Of a job in a group, ranks that decode write files of weights too."""
    expected = {name: weight.clone() for name, weight in tiny_model.export().items()}
    away = OnHost(tiny_model.parameters())
    save_model(tmp_path, tiny_model, tiny_folder)
    assert not any(weight.untyped_storage().nbytes() for weight in tiny_model.parameters()) and away.copies
    saved = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def test_tokenizer_and_generation_files_travel_with_the_export(tiny_model, folder, tmp_path):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    (folder / "merges.txt").write_text("a b\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration_x.Config"}}))
    save_model(tmp_path / "out", tiny_model, folder)
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text()), "its files are not there"
    copied = [path.name for path in folder.iterdir() if path.name not in ("config.json", WEIGHTS)]
    assert {"generation_config.json", "merges.txt", "tokenizer.json"} <= set(copied)
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


# ---- bad folders


def shard(folder: Path) -> list[Path]:
    """Replace the single file by shards; return them."""
    model = load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("checkpoint.SHARD_BYTES", 20_000)
        save_model(folder, model, folder)
    return sorted(folder.glob("*.safetensors"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


NORM = "model.layers.1.input_layernorm.weight"
DAMAGES = {
    "no folder": (lambda f: shutil.rmtree(f), ["model.path", "no such folder"]),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), ["model.path", "no such folder"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "cannot read"]),
    "broken config": (lambda f: cut_in_half(f / "config.json"), ["config.json", "not valid JSON"]),
    "config is not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), ["config.json", "JSON"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), ["config.json", "object"]),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), [WEIGHTS, "no such file"]),
    "weights of another kind": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), [WEIGHTS, "safetensors"]),
    "missing shard": (lambda f: shard(f)[1].unlink(), ["model-00002-of-", "no such file"]),
    "truncated weights": (lambda f: cut_in_half(f / WEIGHTS), [WEIGHTS, "cannot read the weights"]),
    "truncated shard": (lambda f: cut_in_half(shard(f)[2]), ["model-00003-of-", "cannot read the weights"]),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), [WEIGHTS, "cannot read the weights"]),
    "broken index": (lambda f: (shard(f), cut_in_half(f / INDEX)), [INDEX, "JSON"]),
    "index without a map": (lambda f: (shard(f), (f / INDEX).write_text("{}")), [INDEX, "weight_map"]),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(NORM)), ["1 weights are missing", NORM]),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({NORM: torch.ones(33)})),
        [WEIGHTS, NORM, "[33]", "[32]"],
    ),
    "config of another size": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace('_size": 128', '_size": 64')),
        [WEIGHTS, "mlp.", "128", "64"],
    ),
}


@pytest.mark.parametrize("load_or_check", [check_model, load], ids=["check", "load"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_bad_model_folder_is_refused_by_name(name, load_or_check, folder):
    damage, words = DAMAGES[name]
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load_or_check(folder)
    assert [word for word in [str(folder), *words] if word not in str(caught.value)] == []


def test_a_folder_without_tokenizer_is_refused(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="cannot load the tokenizer") as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


# ---- end tokens


@pytest.mark.parametrize(
    "generation, ids",
    [(None, {0}), ({}, {0}), ({"eos_token_id": 7}, {0, 7}), ({"eos_token_id": [3, 8]}, {0, 3, 8})],
)
def test_end_tokens_of_tokenizer_config_and_generation_config_add_up(folder, generation, ids):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert eos_ids(folder, load_tokenizer(folder), 32) == ids
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [11]}))
    assert eos_ids(folder, load_tokenizer(folder), 32) == ids | {11}


def test_no_end_token_at_all_is_refused(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_ids(folder, tokenizer, 32)


def test_a_broken_generation_config_is_refused_by_name(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1,')
    with pytest.raises(ConfigError, match="generation_config.json"):
        eos_ids(folder, load_tokenizer(folder), 32)


# ---- checkpoints of a run


def save(run: Path, step: int, model: Model, source: Path, keep: int) -> Path:
    """Write a checkpoint of a run, with moments that belong to its step; return its folder."""
    checkpoints = Checkpoints(run, source, keep, ALONE)
    state = {"step": step, "queue": [[0, 7, 1.5]], "planner": {"short": None}}
    checkpoints.save(step, model, {"moments": torch.arange(100.0).view(4, 25) * step}, state)
    checkpoints.wait()
    return checkpoints.folder


def test_the_newest_checkpoints_are_kept_oldest_first(tiny_model, tiny_folder, tmp_path):
    assert list_checkpoints(tmp_path) == []
    for step in (9, 10, 11, 100, 101):
        saved = save(tmp_path, step, tiny_model, tiny_folder, keep=3)
        assert saved == list_checkpoints(tmp_path)[-1]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000011", "step_000100", "step_000101"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000011", "step_000100", "step_000101"]


def test_the_checkpoint_of_the_best_evaluation_is_kept_and_linked(tiny_model, tiny_folder, tmp_path):
    checkpoints, link = Checkpoints(tmp_path, tiny_folder, 2, ALONE, keep_best=True), tmp_path / "checkpoints" / "best"
    expected = {1: (0.1, 0, [1]), 2: (0.5, 2, [1, 2]), 3: (0.5, 2, [2, 3]), 4: (0.1, 2, [2, 3, 4])}
    expected |= {5: (0.3, 2, [2, 4, 5]), 6: (0.6, 6, [5, 6]), 7: (0.0, 6, [6, 7]), 8: (0.1, 6, [6, 7, 8])}
    assert checkpoints.rated(0, {"avg@4": 0.1, "pass@4": 0.9})["best"]["step"] == 0, "it has no checkpoint"
    for step, (score, best, kept) in expected.items():
        told = checkpoints.rated(step, {"avg@4": score, "pass@4": 1 - score})
        assert told["best"]["step"] == best and told["avg@4"] == score
        checkpoints.save(step, tiny_model, {"moments": torch.ones(2)}, {"step": step})
        checkpoints.wait()
        assert [load_state(folder)["step"] for folder in list_checkpoints(tmp_path)] == kept
        assert load_state(link)["step"] == best if best else not link.exists()
    assert checkpoints.rated(9, {"avg@4": 0.9, "pass@4": 0.9})["best"]["step"] == 9, "it is not saved"
    checkpoints.save(10, tiny_model, {"moments": torch.ones(2)}, {"step": 10})
    checkpoints.wait()
    assert not os.path.lexists(link), "step 6 is not the best any more"
    link.mkdir()  # as where a run was copied with what its links name
    checkpoints.save(11, tiny_model, {"moments": torch.ones(2)}, {"step": 11})
    checkpoints.wait()
    assert list_checkpoints(tmp_path)[-1].name == "step_000011" and link.is_dir()
    assert Checkpoints(tmp_path, tiny_folder, 2, ALONE).rated(9, {"avg@4": 0.1}) == {"avg@4": 0.1}


def test_an_old_checkpoint_that_others_read_may_stay_a_while(tiny_model, tiny_folder, tmp_path, monkeypatch):
    """NFS keeps a file that is open, under another name, so its folder cannot be removed."""
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (1, 2, 2):
        save(tmp_path, step, tiny_model, tiny_folder, keep=1)
        assert [path.name for path in list_checkpoints(tmp_path)] == [f"step_{step:06d}"]
        monkeypatch.setattr(shutil, "rmtree", busy if step == 1 else remove)
    assert sorted(os.listdir(tmp_path / "checkpoints"))[-1] == "step_000002"


def test_steps_beyond_the_zeros_of_the_name_stay_in_order(tiny_model, tiny_folder, tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, tiny_model, tiny_folder, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1000000"]


def test_a_checkpoint_gives_back_model_tensors_and_state(random_model, tiny_folder, tmp_path):
    folder = save(tmp_path, 3, random_model, tiny_folder, keep=2)
    assert_bit_equal(load(folder), random_model)
    moments = torch.zeros(4, 25)
    load_tensors(folder, {"moments": moments}, ALONE)
    assert torch.equal(moments, torch.arange(100.0).view(4, 25) * 3)
    assert load_state(folder) == {"step": 3, "queue": [[0, 7, 1.5]], "planner": {"short": None}}
    assert load_tokenizer(folder).encode("abc") == load_tokenizer(tiny_folder).encode("abc")


def test_a_checkpoint_with_other_tensors_is_refused(tiny_model, tiny_folder, tmp_path):
    folder = save(tmp_path, 3, tiny_model, tiny_folder, keep=2)
    with pytest.raises(ConfigError, match="master.norm .*model.dtype"):
        load_tensors(folder, {"moments": torch.zeros(4, 25), "master.norm": torch.zeros(2)}, ALONE)


def test_a_checkpoint_is_of_the_moment_of_its_save_and_seen_when_whole(
    random_model, tiny_folder, tmp_path, monkeypatch
):
    """Whatever changes while it is written; and the next save, or the end of the run, waits for it."""
    may_write, write = threading.Semaphore(0), _Writer.write_data  # a checkpoint at a time
    monkeypatch.setattr(_Writer, "write_data", lambda *args: may_write.acquire(timeout=600) and write(*args))
    before = copy.deepcopy(random_model)
    checkpoints, moments, state = Checkpoints(tmp_path, tiny_folder, 9, ALONE), torch.ones(3), {"step": 1}
    checkpoints.save(1, random_model, {"moments": moments}, state)
    for tensor in (moments, *random_model.parameters()):
        tensor.data.zero_()
    state["step"] = 2
    checkpoints.check()
    assert list_checkpoints(tmp_path) == [], "nothing is there before all of it is"
    threading.Timer(0.2, may_write.release).start()
    checkpoints.save(2, random_model, {"moments": moments}, state)
    [first] = list_checkpoints(tmp_path)
    assert_bit_equal(load(first), before)
    assert load_state(first) == {"step": 1}
    load_tensors(first, {"moments": moments}, ALONE)
    assert moments.tolist() == [1, 1, 1]
    threading.Timer(0.2, may_write.release).start()
    with pytest.raises(ValueError), checkpoints:
        raise ValueError
    assert [load_state(folder) for folder in list_checkpoints(tmp_path)] == [{"step": 1}, {"step": 2}]


def test_a_block_ends_with_a_whole_checkpoint_or_an_error(tiny_model, tiny_folder, tmp_path, monkeypatch):
    write, told = _Writer.write_data, OSError(28, "no space")
    monkeypatch.setattr(_Writer, "write_data", lambda *args: time.sleep(0.3) or write(*args))
    with Checkpoints(tmp_path, tiny_folder, 9, ALONE) as checkpoints:
        checkpoints.save(1, tiny_model, {}, {})
    assert len(list_checkpoints(tmp_path)) == 1
    monkeypatch.setattr(_Writer, "write_data", Mock(side_effect=told))
    with pytest.raises(OSError, match="cannot write .*no space"), Checkpoints(tmp_path, tiny_folder, 9, ALONE) as block:
        block.save(2, tiny_model, {}, {})
    assert len(list_checkpoints(tmp_path)) == 1


def test_a_write_that_does_not_end_is_given_up(tiny_model, tiny_folder, tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(_Writer, "write_data", lambda *_: may_write.wait(60))
    checkpoints = Checkpoints(tmp_path, tiny_folder, 9, replace(ALONE, timeout_seconds=0.1))
    checkpoints.save(1, tiny_model, {}, {})
    with pytest.raises(OSError, match="step_000001 .*not done after run.timeout_seconds = 0.1"):
        checkpoints.wait()
    may_write.set()


@pytest.mark.parametrize("timeout", [5.0, 600.0])
def test_a_failed_run_waits_a_minute_at_most_for_its_checkpoint_and_says_why_it_failed(
    tmp_path, tiny_folder, timeout: float
):
    waits = []

    def never(seconds: float):
        waits.append(seconds)
        raise TimeoutError

    checkpoints = Checkpoints(tmp_path, tiny_folder, 9, replace(ALONE, timeout_seconds=timeout))
    checkpoints.folder, checkpoints.under_way = tmp_path, SimpleNamespace(result=never)
    with pytest.raises(ValueError, match="ours"), checkpoints:
        raise ValueError("ours")
    assert waits == [min(timeout, 60.0)]


def test_an_error_of_ours_in_the_writing_is_no_full_disk(tiny_model, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(_Writer, "finish", lambda *_, **__: [][0])
    checkpoints = Checkpoints(tmp_path, tiny_folder, 9, ALONE)
    checkpoints.save(1, tiny_model, {}, {})
    with pytest.raises(IndexError):
        checkpoints.wait()


def write_together(world: World, run: Path, source: Path) -> None:
    """On two ranks: tensors that both have, and in parts, of sizes that two does not divide; and a disk too small."""
    model, mesh = load(source), init_device_mesh("cpu", (2,))
    whole = {"rows": torch.arange(39.0).view(13, 3), "one": torch.tensor([7.0])}
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    for name, tensors, shard in (("copies", whole, 1), ("parts", parts, 2)):
        checkpoints = Checkpoints(run / name, source, 1, world, shard)
        checkpoints.save(1, model, tensors, {})
        checkpoints.wait()
        for layout in (Shard(0), Shard(-1), Replicate()):
            found = {n: distribute_tensor(torch.zeros_like(t), mesh, [layout]) for n, t in whole.items()}
            load_tensors(checkpoints.folder, found, world)
            assert all(torch.equal(found[n].full_tensor(), whole[n]) for n in whole), (name, layout)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    checkpoints.save(2, model, parts, {})
    with pytest.raises(OSError, match="cannot write .*step_000002"):
        checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    parallel.barrier(world)
    assert [path.name for path in checkpoints.folder.parent.iterdir()] == ["step_000001"]


def test_ranks_write_each_tensor_once_and_any_number_reads_it(run_ranks, tiny_folder, tmp_path):
    run_ranks(2, write_together, tmp_path, tiny_folder)
    for name, files in (("copies", [{"rows"}, {"one"}]), ("parts", [{"rows", "one"}] * 2)):
        [folder] = list_checkpoints(tmp_path / name)
        assert [load_file(path).keys() for path in sorted((folder / OPTIMIZER).iterdir())] == files
        assert not damage(folder)
        found = {"rows": torch.zeros(13, 3), "one": torch.zeros(1)}
        load_tensors(folder, found, ALONE)
        assert torch.equal(found["rows"], torch.arange(39.0).view(13, 3)) and found["one"].tolist() == [7]
        assert_bit_equal(load(folder), load(tiny_folder))


CHANGES = {f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")}


class Victim:
    """A run without training, whose saves are made in forks: one import of torch serves every kill."""

    def __init__(self, source: Path, run: Path, keep: int):
        os.fsync = lambda handle: None  # a kill, unlike a power cut, does not lose what was written
        self.source, self.run, self.keep, self.model = source, run, keep, load(source)

    def save(self, step: int) -> None:
        for tensor in self.model.parameters():
            tensor.data.fill_(step)
        checkpoints = Checkpoints(self.run, self.source, self.keep, ALONE)
        checkpoints.save(step, self.model, {"moments": torch.full((1000,), float(step))}, {"step": step})
        checkpoints.wait()

    def check(self, least: int) -> list[int]:
        """Return the steps of all checkpoints, which are whole, and `least` of them at least."""
        steps = []
        for folder in list_checkpoints(self.run):
            steps.append(load_state(folder)["step"])
            moments = torch.zeros(1000)
            load_tensors(folder, {"moments": moments}, ALONE)
            assert folder.name == f"step_{steps[-1]:06d}" and (moments == steps[-1]).all()
            assert all((tensor == steps[-1]).all() for tensor in weights_of(load(folder)).values())
        assert steps == sorted(steps) and len(steps) >= least, steps
        return steps

    def fork(self, work: Callable[[], object]) -> int:
        if pid := os.fork():
            return pid
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)  # not killed, not done


def kill_at_random_moments(source: Path, run: Path) -> int:
    victim, rng = Victim(source, run, keep=2), random.Random(1)
    for _ in range(10):
        first = max(victim.check(0), default=0) + 1
        reader, writer = os.pipe()
        pid = victim.fork(lambda: [(victim.save(step), os.write(writer, b".")) for step in range(first, 10**6)])  # noqa: B023
        os.close(writer)
        start = time.monotonic()
        assert os.read(reader, 1)  # the first save, which says how long one takes on this machine, however busy
        time.sleep(rng.uniform(0, 3) * (time.monotonic() - start))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        saved = first + len(os.read(reader, 10**6))
        os.close(reader)
        assert victim.check(1)[-1] in (saved, saved + 1)  # killed before it could say so
    return 0


def kill_at_every_call(source: Path, run: Path, step: int, keep: int) -> int:
    """Save steps up to 3, then kill the save of `step` ahead of its n-th change of a file or look into one."""
    victim, left, kills = Victim(source, run, keep), math.inf, 0
    for saved in (1, 2, 3)[-keep:]:
        victim.save(saved)
    before = shutil.copytree(run, run.with_name("before"))

    def die_when_due(event: str, args: tuple) -> None:
        nonlocal left
        if event in CHANGES or (event == "open" and str(args[0]).startswith(str(run))):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def save_and_be_killed() -> None:
        nonlocal left
        left = kills
        victim.save(step)

    sys.addaudithook(die_when_due)
    while True:
        shutil.rmtree(run)
        shutil.copytree(before, run)
        _, status = os.waitpid(victim.fork(save_and_be_killed), 0)
        victim.check(keep if step == 4 else keep - 1)
        if status != signal.SIGKILL:
            assert status == 0
            break
        victim.save(5)  # the run goes on as if nothing had happened
        assert victim.check(1)[-1] == 5
        others = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step_")]
        assert not others, others
        kills += 1
    assert kills > 20, kills
    return 0


@pytest.mark.parametrize(
    "main, given",
    [thorough(kill_at_random_moments, ()), (kill_at_every_call, (4, 1)), thorough(kill_at_every_call, (3, 2))],
    ids=["at random moments", "at every call", "at every call of writing a step again"],
)
def test_a_kill_leaves_only_whole_checkpoints(main, given, run_mains, tiny_folder, tmp_path):
    [ended] = run_mains(1, main, tiny_folder, tmp_path / "run", *given)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("name", [STATE, f"{OPTIMIZER}/shard-00000.safetensors", "model.safetensors", "config.json"])
def test_one_wrong_bit_or_a_missing_file_is_seen(tiny_model, tiny_folder, tmp_path, name):
    folder = save(tmp_path, 3, tiny_model, tiny_folder, keep=1)
    assert damage(folder) == ""
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert damage(folder).startswith(f"{path}: damaged") and f"remove {folder}" in damage(folder)
    assert sum(bool(damage(folder, rank, 3)) for rank in range(3)) == 1, "each rank looks at other files"
    path.unlink()
    assert str(path) in damage(folder) and f"remove {folder}" in damage(folder)
    for harm in (lambda path: path.write_text("[]"), cut_in_half, Path.unlink):
        harm(folder / CHECKSUMS)
        assert "cannot be read" in damage(folder) and f"remove {folder}" in damage(folder)


@pytest.mark.parametrize("name", [STATE, f"{OPTIMIZER}/shard-00000.safetensors", "model.safetensors", "config.json"])
def test_checksums_are_of_every_file(tiny_model, tiny_folder, tmp_path, name):
    folder = save(tmp_path, 3, tiny_model, tiny_folder, keep=1)
    known = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).write_text(json.dumps({key: value for key, value in known.items() if key != name}))
    assert f"has no checksum of {name}; move that file away if it is yours, or remove " in damage(folder)
    (folder / CHECKSUMS).write_text("{}")
    assert "has no checksum of" in damage(folder)


def test_a_profile_beside_a_checkpoint_is_no_damage(tiny_model, tiny_folder, tmp_path):
    folder = save(tmp_path, 3, tiny_model, tiny_folder, keep=1)
    (folder / PROFILE_NAME).write_text("{}")
    assert damage(folder) == damage(folder, of_model=True) == ""


def test_a_state_without_a_key_and_a_cut_file_are_told_in_one_line(tiny_model, tiny_folder, tmp_path):
    folder = save(tmp_path, 3, tiny_model, tiny_folder, keep=1)
    with pytest.raises(ConfigError, match=f"has no 'nothing'; remove {folder}"):
        load_state(folder)["nothing"]
    cut_in_half(folder / OPTIMIZER / "shard-00000.safetensors")
    with pytest.raises(ConfigError, match=f"remove {folder}"):
        load_tensors(folder, {}, ALONE)


def test_a_checkpoint_of_an_earlier_version_is_refused_with_the_way_on(tmp_path):
    folder = tmp_path / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    torch.save({"step": 3}, folder / "state.pt")
    with pytest.raises(ConfigError, match=f"earlier version.*model.path={folder}"):
        newest_checkpoint(tmp_path, ALONE)


@pytest.mark.parametrize("limit", [2_000, 60_000])
def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(limit, tiny_model, tiny_folder, tmp_path):
    checkpoints, moments = Checkpoints(tmp_path, tiny_folder, 2, ALONE), {"moments": torch.zeros(100_000)}
    checkpoints.save(3, tiny_model, moments, {})
    checkpoints.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # of a file: weights or moments do not fit
    try:
        checkpoints.save(6, tiny_model, moments, {})
        with pytest.raises(
            OSError, match="cannot write .*step_000006 .*MiB are free.*the checkpoint before it is whole"
        ):
            while True:  # as each step of a run does
                checkpoints.check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [first] = list_checkpoints(tmp_path)
    assert first.name == "step_000003" and not damage(first)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
