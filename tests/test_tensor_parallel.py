"""Tensor-parallel engines against one that has the whole model: same weights, same tokens, on every rank."""

import copy
import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import FusedEngine, thorough
from test_drafts import Foresight, assert_same
from torch.distributed import _symmetric_memory

import parallel
from checkpoint import load_model, save_model
from config import ConfigError
from engine.cpu import SharedMemory
from engine.sequence import Sequence
from engine.shard import Shard
from model import Model, Split, check_split, parse_shape
from parallel import ONE_SHOT_BYTES, TensorParallel, World, gather_objects, with_shared_memory
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig, sample_key

SHAPE = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FAMILIES = {
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},  # more ranks than KV heads
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "tied": {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6},
    "mixture": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "llama": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def random_model(family: str) -> Model:
    model = Model(parse_shape(SHAPE | FAMILIES[family], family))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return model


def sequences() -> list[Sequence]:
    rng = Random(0)
    prompts = [tuple(rng.randrange(131) for _ in range(rng.randint(1, 20))) for _ in range(10)]
    return [Sequence(i // 2, i % 2, 0, prompts[i // 2], sample_key(0, i), 24) for i in range(10)]


def generate(engine: Engine) -> dict:
    for s in sequences():
        engine.add(s)
    samples: dict = {}
    while not engine.is_idle:
        samples |= {s.id: s for s in engine.step()}
    return samples


CONFIG = RolloutConfig(max_prompt_tokens=20, max_response_tokens=24, max_running=6, page_size=4, kv_gib=0.001)


def same_tokens(world: World, size: int, family: str, shared: bool) -> None:
    model = random_model(family)
    tp = TensorParallel(world, size)
    assert (tp.world.shared is not None) == (size > 1)
    if not shared:
        tp.world = replace(tp.world, shared=None)
    kinds = [(0.0, Engine)] * (family == "qwen2") + [(1.0, Engine)] * shared + [(1.0, FusedEngine)]
    for temperature, kind in kinds:
        sampling = SamplingConfig(temperature)
        whole = generate(Engine(model, CONFIG, sampling, [7]))
        other = copy.deepcopy(model).requires_grad_(False)
        engine = kind(other, replace(CONFIG, tensor_parallel=size), sampling, [7], parallel=tp)
        if temperature:
            changed = other.layers[0].qkv_proj
            changed = changed.weight if changed.bias is None else changed.bias  # a bias is never packed
            changed.neg_()
            engine.load_weights(other, 1)
            assert {i: s.token_ids for i, s in generate(engine).items()} != {i: s.token_ids for i, s in whole.items()}
            changed.neg_()
            engine.load_weights(other, 0)
        split = generate(engine)
        assert {i: s.token_ids for i, s in split.items()} == {i: s.token_ids for i, s in whole.items()}
        assert len({t for s in whole.values() for t in s.token_ids}) > 4
        for i, s in split.items():
            assert s.logprobs == pytest.approx(whole[i].logprobs, abs=1e-4)
        engine.drafter = Foresight(whole, right=0.8)
        drafted = generate(engine)
        assert_same(drafted, whole, 1e-4)
        assert engine.drafter.accepted > 0
        everyone = parallel.gather_objects(world, (split, drafted))
        assert all(other == (split, drafted) for other in everyone), "ranks must agree to the last bit"


@pytest.mark.parametrize(
    "family, size, shared",
    [
        thorough("qwen2", 4, True),
        thorough("qwen3", 4, True),
        thorough("mistral", 2, True),
        ("mixture", 2, True),
        thorough("llama", 2, True),
        thorough("llama", 2, False),
    ],
)
def test_ranks_together_draw_the_tokens_of_one(run_ranks, family, size, shared) -> None:
    run_ranks(4 if size == 4 else 2, same_tokens, size, family, shared)


def two_replicas(world: World) -> None:
    tp = TensorParallel(world, 2)
    assert (tp.replica, tp.rank, tp.num_replicas) == (world.rank // 2, world.rank % 2, 2)
    x = torch.full((3, 5), float(10**world.rank))
    assert tp.reduce(x).unique().tolist() == [[11.0], [1100.0]][tp.replica]
    assert tp.gather(x).unique().tolist() == [[1.0, 10.0], [100.0, 1000.0]][tp.replica]


def test_replicas_are_neighbours_and_keep_to_themselves(run_ranks) -> None:
    run_ranks(4, two_replicas)


def many_rounds(world: World) -> None:
    tp, generator = TensorParallel(world, world.size), torch.Generator().manual_seed(0)
    for i in range(600):
        shape = tuple(torch.randint(1, 40, (2,), generator=generator).tolist())
        parts = torch.randn(world.size, *shape, generator=generator)
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        mine = parts[world.rank].to(dtype)
        assert torch.equal(tp.reduce(mine), parts.to(dtype).sum(0))
        if i % 5 == world.rank:
            torch.randn(200, 200)  # ranks drift apart
        assert torch.equal(tp.gather(mine.T), torch.cat(list(parts.to(dtype).transpose(1, 2)), -1))
    large = torch.ones(SharedMemory.SLOT_BYTES // 4 + 1)
    assert tp.gather(large[:, None] * world.rank)[-1].tolist() == [0, 1, 2]
    assert tp.reduce(large)[0] == world.size


def test_shared_memory_survives_many_rounds_of_ranks_that_drift(run_ranks) -> None:
    run_ranks(3, many_rounds)


def objects_through_memory(world: World) -> None:
    own = with_shared_memory(world, slot_bytes=2**14, naps=True)
    assert own.shared and not world.shared
    for size in (1, 3000, 5000, 100_000, 1):  # bytes: the first collective is enough, the second, gloo's
        if size % 3 == world.rank:
            time.sleep(0.02)
        assert [len(part) for part in gather_objects(own, bytes(size * (world.rank + 1)))] == [size, 2 * size, 3 * size]


def test_python_values_go_through_memory_where_they_have_room(run_ranks) -> None:
    run_ranks(3, objects_through_memory)


def test_a_wait_for_a_rank_that_has_died_ends_soon(tmp_path) -> None:
    path = SharedMemory.make_file(2, 64)
    try:
        memories = [SharedMemory(path, rank, 2, 600.0, 64, naps=True) for rank in (0, 1)]
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        memories[1].pids[1] = child.pid
        with pytest.raises(ConnectionError, match=r"\[1\] have ended"):
            memories[0].exchange(torch.ones(3))
        memories[0].pids[1], memories[0].timeout_seconds = os.getpid(), 0.01
        with pytest.raises(TimeoutError, match="timed out|waited"):
            memories[0].exchange(torch.ones(3))
    finally:
        os.unlink(path)


def test_no_memory_to_share_is_told_and_done_without(monkeypatch, capsys) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert SharedMemory.make_file(2, 64) == "" and "gloo" in capsys.readouterr().out


def sums_by_one_kernel(world: World, refused: bool) -> None:
    """Stand-ins for torch's calls, which need GPUs; gloo computes the sum."""
    made, sums = list[torch.Tensor](), list[torch.Tensor]()

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.zeros(size, dtype=dtype))
        return made[0]

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> None:
        assert memory is made[0] and group is world.tensors
        if refused and world.rank == 1:
            raise RuntimeError("no peer access\nat ...")

    def one_shot(place: torch.Tensor, operation: str, group: str) -> torch.Tensor:
        assert place.data_ptr() == made[0].data_ptr() and (place == 1).all()
        assert operation == "sum" and group == world.tensors.group_name and place.is_contiguous()
        sums.append(place)
        total = place.clone()
        dist.all_reduce(total)
        return total

    _symmetric_memory.empty, _symmetric_memory.rendezvous = empty, rendezvous
    patch.object(torch.ops.symm_mem, "one_shot_all_reduce", one_shot, create=True).start()
    tp, most = TensorParallel(replace(world, device=torch.device("cuda")), 2), ONE_SHOT_BYTES // 2 // 4
    assert (tp.symmetric is None) == refused
    small, large, columns = torch.ones(most), torch.ones(most + 1), torch.ones(3, 8, dtype=torch.bfloat16)[:, :4]
    for x in (small, large, columns):
        total = tp.reduce(x)
        assert (total == 2).all() and (total.shape, total.dtype) == (x.shape, x.dtype)
    assert [x.numel() for x in sums] == ([] if refused else [most, 12])


@pytest.mark.parametrize("refused", [False, True])
def test_gpus_sum_few_rows_through_memory_that_all_can_read(run_ranks, refused) -> None:
    """All ranks go by NCCL when torch refuses one."""
    run_ranks(2, sums_by_one_kernel, refused)


def one_never_comes(world: World) -> None:
    tp = TensorParallel(replace(world, timeout_seconds=0.5), 2)
    if world.rank == 0:
        with pytest.raises(TimeoutError, match=r"waited 0.5 s for \[1\]"):
            tp.reduce(torch.ones(3))
    parallel.barrier(world)


def test_waiting_for_a_rank_that_never_comes_ends_in_an_error(run_ranks) -> None:
    run_ranks(2, one_never_comes)


def test_shards_are_views_where_each_rank_has_a_kv_head() -> None:
    model = random_model("llama")
    tp = TensorParallel(World(0, 1, torch.device("cpu")))
    tp.size, tp.rank = 2, 1
    shard = Shard(model, tp, prepack=False)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = [t for w in shard.layers for t in w if t is not None] + [shard.head]
    assert all(t.untyped_storage().data_ptr() in owned for t in tensors)


def test_a_split_that_does_not_divide_is_refused_with_what_is_possible() -> None:
    shape = parse_shape(SHAPE | FAMILIES["qwen2"], "qwen2")
    check_split(shape, 4)
    with pytest.raises(ConfigError, match=r"8 ranks .* 4 heads, 2 KV heads .* possible here: \[1, 2, 4\]"):
        check_split(shape, 8)
    parallel, model = TensorParallel(World(0, 1, torch.device("cpu"))), random_model("qwen2")
    with pytest.raises(ValueError, match=r"3 ranks .* possible here: \[1, 2, 4\]"):  # before any memory is taken
        Engine(model, CONFIG, SamplingConfig(), (), parallel=parallel, sizes=(2, 3))
    parallel.size = 8
    with pytest.raises(ValueError, match=r"8 ranks .* possible here: \[1, 2, 4\]"):
        Engine(model, CONFIG, SamplingConfig(), (), parallel=parallel)
    assert Split(shape, 3, 4).num_kv_heads == 1 and Split(shape, 3, 4).groups == 1


def test_exported_weights_do_not_depend_on_the_split(tmp_path, tiny_folder) -> None:
    model = load_model(tiny_folder, torch.device("cpu"), torch.float32)
    save_model(tmp_path, model, tiny_folder)
    again = load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
