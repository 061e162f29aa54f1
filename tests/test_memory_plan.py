"""The memory plan: its arithmetic, what a run makes of it, and that a run holds what it plans."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ALONE, ROOT, thorough
from test_benchmarks import load
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import train
from attention import PackedAttention
from config import ConfigError, load_config
from engine import native
from loss import LossConfig
from model import Model, parse_shape
from parallel import World
from policies.memory_plan import GIB, Plan, layer_bytes, plan
from sampling import SamplingConfig, score
from settings import Config, check_memory, find_remedy, memory_plan, with_kv_memory, with_layout
from trainer import Trainer, TrainerConfig
from weights.lora import LoraConfig

CUDA = torch.device("cuda", 0)
QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
QWEN_1B = QWEN_7B | {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SCORED, BACKWARD = "as a chunk of logits is scored", "in the backward pass of the last layer"


QWEN_32B = QWEN_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


def configured(*settings: str) -> Config:
    """Return the settings of 128 x 8 responses of 1k + 8k tokens on GPUs of 80 GB."""
    given = ["--run.device_gib=79.6", *(f"--{setting}" for setting in settings)]
    return load_config(Config, str(ROOT / "configs/qwen_math.toml"), given)


def planned(*settings: str, model: dict = QWEN_7B, ranks: int = 8) -> Plan:
    [made] = memory_plan(configured(*settings), parse_shape(model, "test"), ranks, ranks, CUDA)
    return made


def together(made: Plan) -> float:
    """Return the GiB of all parts of a micro-batch, as if they met in one moment."""
    return sum((made.moments[SCORED] | made.moments[BACKWARD]).values()) / GIB


def test_a_layer_keeps_what_was_counted_by_hand() -> None:
    assert layer_bytes(planned(model=QWEN_1B).demand) == 107 * 1024
    assert layer_bytes(planned().demand) == 234 * 1024


def test_a_7b_model_on_eight_gpus_of_80_gb() -> None:
    """The arithmetic of a review by hand: it wants 70 GiB and 16 GiB beside what lasts, and has 19.5."""
    kept = "trainer.recompute=off", "trainer.tokens_per_logits=4096"
    whole, sharded = planned(), planned("trainer.shard=8", "rollout.kv_gib=30.2")
    held = planned("trainer.shard=8", "rollout.kv_gib=30.2", *kept)
    assert not whole.fits and not held.fits and sharded.fits
    names = "weights of the rollout", "masters", "gradients", "optimizer state"
    assert [whole.lasting[name] / GIB for name in names] == pytest.approx([14.2, 28.4, 28.4, 56.7], abs=0.05)
    lasting = sum(sharded.lasting[name] for name in names) / GIB + 1.5 + 30.2  # context, communicators and pages
    assert 79.6 - lasting == pytest.approx(19.5, abs=0.2)
    assert together(sharded) == pytest.approx(16.2, rel=0.05)
    longest = replace(held.demand, tokens=8192)  # a sample of 1k + 8k tokens, which goes alone, is longer
    assert together(plan(longest)) == pytest.approx(70, rel=0.02)


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is said to settings that do not fit, or leave little room, on machines of eight GPUs."""

    def said(*settings: str, model: dict = QWEN_7B, ranks: int = 8) -> str:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
        config, given = configured(*settings), (parse_shape(model, "test"), ranks, min(ranks, 8), CUDA)
        made = memory_plan(config, *given)
        if all(each.has_room for each in made):
            return ""
        if all(each.fits for each in made):
            check_memory(config, made, *given)
            return find_remedy(config, made, *given)
        with pytest.raises(ConfigError) as refused:
            check_memory(config, made, *given)
        return str(refused.value).partition("; take ")[2]

    return said


def test_a_plan_that_cannot_work_is_refused_with_the_settings_that_would_help(advice) -> None:
    shard, small = "trainer.shard=8", "run.device_gib=40"
    for settings, helps in (
        ((), "trainer.shard = 4, which"),
        (("trainer.recompute=off",), "trainer.recompute = on and trainer.shard = 4, which"),
        ((shard, "run.device_gib=60", "trainer.tokens_per_logits=9216"), "trainer.tokens_per_logits = 1024, which"),
        ((shard, "rollout.kv_gib=60"), "rollout.kv_gib = 0, which"),
        ((shard, "rollout.step_tokens=1000000"), "rollout.step_tokens = 2048, which"),
        ((shard, "trainer.tokens_per_microbatch=300000"), "trainer.tokens_per_microbatch = 9216, which"),
        ((shard, "run.device_gib=20"), "a smaller model"),
        ((small,), "trainer.shard = 8 and rollout.tensor_parallel = 4, which"),
        # Halves of the replicas have no whole groups of eight ranks.
        ((small, "stream.policy=paper"), "trainer.shard = 8 and rollout.tensor_parallel = 4 and stream.policy = off"),
        (("run.device_gib=60", "stream.policy=paper"), "trainer.shard = 4 and rollout.tensor_parallel = 2, which"),
    ):
        assert advice(*settings).startswith(helps), (settings, advice(*settings))
    assert not advice("trainer.shard=4") and not advice(model=QWEN_1B)


def test_settings_that_leave_room_for_many_sequences_are_advised_before_others(advice) -> None:
    """The rest of these GPUs would hold 4, 3 and 1 of the longest sequences after changes that only fit."""
    sharded = "trainer.shard = 8 and rollout.tensor_parallel = 4, which leaves pages for 72.1"
    assert advice("run.device_gib=141", model=QWEN_32B).startswith(sharded)  # auto shards the rollout's weights then
    assert advice("run.device_gib=141", ranks=2).startswith("trainer.shard = 2, which leaves pages for 107.4")
    assert "tensor_parallel = 4, which leaves pages for 33.0" in advice("run.device_gib=48", ranks=4)
    assert "for 16.7" in advice("run.device_gib=141", ranks=1)  # nothing gives more
    few = "trainer.shard=8", "rollout.weights=whole", "run.device_gib=44"
    assert planned(*few).fits and planned(*few).sequences < 10  # warned of
    assert advice(*few).startswith("rollout.tensor_parallel = 2 and trainer.offload_optimizer = true, which")


def test_sharded_weights_are_advised_where_nothing_less_helps(advice) -> None:
    settings = "trainer.shard=64", "rollout.tensor_parallel=4", "trainer.offload_optimizer=true"
    assert advice(*settings, "rollout.weights=whole", model=QWEN_32B, ranks=64).startswith("rollout.weights = sharded,")


def test_weights_are_sharded_where_whole_ones_leave_pages_too_little() -> None:
    def layout(model: dict, *settings: str, device: torch.device = CUDA) -> str:
        return with_layout(configured(*settings), parse_shape(model, "test"), 64, 8, device).rollout.weights

    assert layout(QWEN_7B, "trainer.shard=8") == layout(QWEN_7B) == layout(QWEN_32B) == "whole"
    assert layout(QWEN_32B, "trainer.shard=64") == layout(QWEN_7B, "trainer.shard=8", "run.device_gib=50") == "sharded"
    assert layout(QWEN_32B, "trainer.shard=64", "rollout.weights=whole") == "whole"
    assert layout(QWEN_32B, "trainer.shard=64", device=torch.device("cpu")) == "whole"
    with pytest.raises(ConfigError, match="take trainer.shard over 1"):
        layout(QWEN_7B, "rollout.weights=sharded")


def test_pages_get_the_rest_and_the_table_adds_up() -> None:
    made = planned("trainer.shard=8")
    assert made.wanted + made.kv == 79.6 * GIB and made.total <= 79.6 * GIB
    _, layout, *_, last = made.table().splitlines()
    assert layout == "(rollout.weights = auto: whole)" and f"{made.sequences:.1f} longest sequences" in made.table()
    assert last.split() == ["sum", f"{made.total / GIB:.3f}"]
    lines = [line.rsplit(maxsplit=1) for line in made.table().splitlines()[1:-1] if line.startswith("  ")]
    assert sum(float(size) for _, size in lines) == pytest.approx(made.total / GIB, abs=0.01)
    sharded = plan(replace(made.demand, layout="sharded", tensor_parallel=4))
    assert sharded.kv - made.kv == pytest.approx(made.demand.weights * 3 / 4)


def test_settings_that_take_memory_have_a_line() -> None:
    plain = planned("trainer.shard=8")
    more = planned("trainer.shard=8", "loss.kl_coef=0.1", "judge.path=x", "judge.memory_gib=2", "planner.rule=paper")
    extra = {name: size - plain.lasting.get(name, 0.0) for name, size in more.lasting.items()}
    assert extra["weights of the reference"] == plain.demand.weights and extra["judge"] == 2 * GIB
    # Sizes 2 and 4 have groups of ranks, and each size has graphs of its own.
    assert plain.demand.communicators == 1 and more.demand.communicators == 3
    assert more.demand.graphs == 3 * plain.demand.graphs == 3 * 23
    filters = planned("trainer.shard=8", "sampling.top_p=0.9")
    logits = plain.demand.cache.max_running * plain.demand.shape.vocab_size
    assert filters.lasting["CUDA graphs"] - plain.lasting["CUDA graphs"] == 8 * logits
    away = planned("trainer.shard=8", "trainer.offload_optimizer=true")
    assert not away.lasting["optimizer state"]
    assert away.moments["in the update"]["offloaded optimizer state"] == plain.lasting["optimizer state"]


def test_a_7b_model_with_adapters_fits_one_gpu_of_80_gb() -> None:
    lora = "trainer.lora.rank=32"
    assert not planned(ranks=1).fits
    made, away = planned(lora, ranks=1), planned(lora, "trainer.offload_optimizer=true", ranks=1)
    assert made.fits and made.sequences > 64 and made.wanted + made.kv == 79.6 * GIB
    matrices = 3584 * (2 * 28 * 128 + 2 * 4 * 128 + 3 * 18944) * 28
    rows = 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))  # of q and o, of k and v, of the MLP
    assert made.lasting["weights without adapters"] == 2 * matrices and made.lasting["masters"] == 4 * 32 * rows
    assert [made.lasting[name] / made.lasting["masters"] for name in TRAINED] == [1, 1, 2]
    assert away.kv - made.kv > 8 * GIB and away.moments["in the update"]["offloaded weights without adapters"]
    # A reference of one rank serves as the weights without adapters; other targets have fewer.
    with_reference = planned(lora, "loss.kl_coef=0.1", ranks=1)
    assert not with_reference.lasting["weights without adapters"]
    few = planned(lora, "trainer.lora.targets=q_proj", ranks=1)
    assert few.lasting["masters"] == 4 * 32 * 28 * 2 * 3584 and few.wanted < made.wanted - 9 * GIB
    sharded = planned(lora, "trainer.shard=8", "rollout.weights=sharded", "rollout.tensor_parallel=4")
    assert sharded.lasting["weights without adapters"] == 2 * matrices / 8
    assert sharded.lasting["parts of the weights to train with"] == sharded.demand.weights / 8
    assert sharded.lasting["masters"] == made.lasting["masters"]


APART = "overlap.depth=1", "overlap.bound=4", "scheduler.policy=synchronous", "stream.policy=off"
TRAINED = "masters", "gradients", "optimizer state"


def test_ranks_that_only_train_or_decode_hold_their_own_part() -> None:
    more = "trainer.shard=4", "loss.kl_coef=0.1", "judge.path=x", "judge.memory_gib=2"
    config = configured(*more, *APART, "overlap.train_ranks=4")
    trains, decodes = memory_plan(config, parse_shape(QWEN_7B, "test"), 8, 8, CUDA)
    both = planned(*more)
    assert [trains.lasting[name] for name in TRAINED] == [both.lasting[name] for name in TRAINED]
    only_training, only_decoding = {*TRAINED, "weights of the reference"}, {"judge", "CUDA graphs"}
    held = [{name for name, size in each.lasting.items() if size} for each in (both, trains, decodes)]
    held = [{name.partition(",")[0] for name in names} for names in held]  # without the number of communicators
    assert held[0] - held[1] == only_decoding and held[0] - held[2] == only_training
    sync = {"as new weights go to the ranks that decode"}
    assert trains.moments.keys() | decodes.moments.keys() == both.moments.keys() | sync
    assert trains.moments.keys() & decodes.moments.keys() == sync
    assert trains.kv == trains.least_kv == 0 and "KV pages" not in trains.table()
    assert decodes.kv > both.kv + 50 * GIB and decodes.wanted + decodes.kv == 79.6 * GIB
    heads = [each.table().splitlines()[0] for each in (trains, decodes)]
    assert [head.partition(" in GiB")[0] for head in heads] == [
        f"planned memory of a rank that only {verb}" for verb in ("trains", "decodes")
    ]


def test_pools_that_cannot_work_are_refused_with_the_settings_that_would_help(advice) -> None:
    assert advice(*APART, "overlap.train_ranks=1").startswith("trainer.shard = 4 and overlap.train_ranks = 4, which")
    two = *APART, "overlap.train_ranks=2", "trainer.shard=2"
    assert advice(*two).startswith("trainer.offload_optimizer = true, which leaves pages for 120.4")
    few = *APART, "overlap.train_ranks=4", "trainer.shard=4", "rollout.kv_gib=61"
    assert advice(*few).startswith("rollout.kv_gib = 0, which leaves pages for 120.4")
    assert not advice(*APART, "overlap.train_ranks=4", "trainer.shard=4")


def test_a_job_in_a_group_leaves_room_for_the_processes_of_others() -> None:
    shape, group = parse_shape(QWEN_7B, "test"), ("trainer.shard=8", "group.server=g")
    for only in ("overlap.train_ranks=4", "run.steps=0"):
        with pytest.raises(ConfigError, match="ranks decode that do not train, .* give judge.memory_gib"):
            memory_plan(configured("judge.path=judge", only), shape, 8, 8, CUDA)
        assert memory_plan(configured("judge.path=judge", "judge.memory_gib=9", only), shape, 8, 8, CUDA)
    for room in ("run.device_gib=70", "rollout.kv_gib=20"):
        assert memory_plan(configured(*group, "run.device_gib=0", room), shape, 8, 8, CUDA)
    with pytest.raises(ConfigError, match=r"KV pages would take the rest .* give rollout.kv_gib, or run.device_gib"):
        memory_plan(configured(*group, "run.device_gib=0"), shape, 8, 8, CUDA)
    assert memory_plan(configured(*group, "run.device_gib=0"), shape, 8, 8, torch.device("cpu"))


def test_a_rank_that_only_decodes_has_no_state_to_train(memory: ModuleType) -> None:
    model = Model(parse_shape(QWEN_1B | {"vocab_size": 64, "hidden_size": 96, "num_hidden_layers": 2}, "test"))
    live, model = memory.LiveBytes(), model.bfloat16().requires_grad_(False)
    with live:
        Trainer(model, TrainerConfig(), LossConfig(), SamplingConfig(), ALONE, 256, 1)
    assert live.peak < 1000


def own_kv(world: World, folder: Path) -> None:
    config = load_config(Config, None, ["--overlap.depth=1", "--overlap.train_ranks=1"])
    kv = with_kv_memory(config, parse_shape(QWEN_1B, "test"), world).rollout.kv_gib
    (folder / str(world.rank)).write_text(str(kv))


def test_ranks_that_only_train_have_pages_for_one_sequence(run_ranks, tmp_path: Path) -> None:
    run_ranks(2, own_kv, tmp_path)
    trains, decodes = (float((tmp_path / rank).read_text()) for rank in "01")
    longest, of_token = 512 + 1024, 28 * 2 * 2 * 128 * 4  # layers, keys and values, heads, numbers, bytes
    assert trains * GIB == longest * of_token and decodes == 0.25


def test_a_mixture_keeps_what_each_expert_reads_and_makes() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 704, "model_type": "qwen3_moe"}
    mixture = parse_shape(QWEN_1B | sizes | {"decoder_sparse_step": 1, "norm_topk_prob": True}, "test")
    dense = replace(mixture, num_experts=0, experts_per_token=0, intermediate_size=mixture.mlp_width)
    demand = planned().demand
    of_token = layer_bytes(replace(demand, shape=mixture)) - layer_bytes(replace(demand, shape=dense))
    assert of_token == 2 * 4 * mixture.hidden_size * demand.itemsize


def test_a_gpu_recomputes_and_holds_fewer_logits_unless_it_is_told() -> None:
    told = TrainerConfig(recompute="off", tokens_per_logits=100)
    auto = TrainerConfig()
    assert auto.for_device("cuda") == replace(auto, recompute="on", tokens_per_logits=2048)
    assert auto.for_device("cpu") == replace(auto, recompute="off", tokens_per_logits=4096)
    assert told.for_device("cuda") == told.for_device("cpu") == told


# ---- what a run makes of it --------------------------------------------------------------------------------------


def test_check_prints_the_plan_of_a_gpu_from_a_config_alone(alone, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    command = ["--check", "--ranks=8", f"--config={ROOT}/configs/qwen_math.toml", f"--model.path={tmp_path}"]
    command += [f"--data.train={tmp_path}/none.jsonl", "--run.device_gib=79.6"]
    assert train.main([*command, "--trainer.shard=8"]) == 2
    said = capsys.readouterr()
    assert said.out.strip() == planned("trainer.shard=8").table() and "model.safetensors" in said.err  # after the plan
    assert train.main([*command, "--trainer.shard=8", "--run.device_gib=50"]) == 2
    said = capsys.readouterr().out
    assert "(rollout.weights = auto: sharded)" in said and "KV pages hold 14.5 of the longest" in said
    assert train.main(command) == 2
    said = capsys.readouterr()
    assert "sum" in said.out and "a GPU of 79.6 GiB is too small" in said.err
    for more, is_told in ((["--trainer.lr=3e-4"], True), (["--trainer.lr=3e-4", "--trainer.lora.rank=8"], False)):
        assert train.main([*command, "--trainer.shard=8", *more]) == 2
        assert ("WARNING: trainer.lr = 0.0003 trains all 7.6e9 weights" in capsys.readouterr().out) == is_told


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of which other programs have `outside` GiB."""
    made = SimpleNamespace(total=int(79.6 * GIB), outside=0.4 * GIB, reserved=20 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=made.total))
    free = lambda device: (made.total - made.reserved - made.outside, made.total)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved)
    return made


def test_a_run_sizes_its_pages_by_the_plan(gpu: SimpleNamespace) -> None:
    config = load_config(Config, str(ROOT / "configs/qwen_math.toml"), [])
    shape, world = parse_shape(QWEN_1B, "test"), World(0, 1, CUDA)
    [as_planned] = memory_plan(config, shape, 1, 1, CUDA)
    assert with_kv_memory(config, shape, world).rollout.kv_gib * GIB == pytest.approx(as_planned.kv)
    gpu.outside = 5 * GIB  # more than CUDA itself takes
    less = with_kv_memory(config, shape, world).rollout.kv_gib * GIB
    assert as_planned.kv - less == pytest.approx(4.5 * GIB)
    gpu.outside = 50 * GIB
    with pytest.raises(ConfigError, match="too small"):
        with_kv_memory(config, shape, world)


def test_a_run_on_a_cpu_has_a_quarter_of_a_gib_and_no_gpu_to_plan_for() -> None:
    shape = parse_shape(QWEN_1B, "test")
    assert with_kv_memory(Config(), shape, ALONE).rollout.kv_gib == 0.25
    config = load_config(Config, None, ["--run.device_gib=80"])
    with pytest.raises(ConfigError, match="run.device_gib = 80"):
        with_kv_memory(config, shape, ALONE)


# ---- planned against measured ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory() -> Iterator[ModuleType]:
    yield from load("memory")


def compare(memory: ModuleType, case: object, world: World) -> None:
    made, peaks = memory.measure(case, world)
    assert made.total == pytest.approx(max(peaks.values()), rel=0.15), (made.table(), peaks)


@pytest.mark.slow
def test_a_run_holds_what_it_plans(memory: ModuleType) -> None:
    """Others than those below, and than that of the script for GPUs."""
    compare(memory, memory.Case("nano", 1, "off", lora=8), ALONE)


def compare_sharded(world: World) -> None:
    for memory in load("memory"):
        compare(memory, memory.Case("nano", world.size, "off", "whole"), world)
        compare(memory, memory.Case("tiny", world.size, "on", "sharded", lora=8), world)


@pytest.mark.thorough
def test_a_sharded_run_holds_what_it_plans(run_ranks) -> None:
    run_ranks(2, compare_sharded)


@pytest.mark.parametrize(
    ("recompute", "chunk", "rank"),
    [
        thorough("on", 2048, 0),
        thorough("off", 4096, 0),
        thorough("on", 2048, 32),
    ],
)
@pytest.mark.slow
def test_a_7b_model_holds_what_is_planned(
    memory: ModuleType, monkeypatch, recompute: str, chunk: int, rank: int
) -> None:
    """A micro-batch of 8,192 tokens in bfloat16, on tensors that have a size and no data, by torch's operations."""
    monkeypatch.setattr(native, "library", lambda: None)
    examples, live = memory.examples(8192, 1), memory.LiveBytes(fakes=True)
    attention = PackedAttention([e.num_tokens for e in examples], ALONE.device)
    attention._pad()  # its places depend on data
    monkeypatch.setattr("trainer.PackedAttention", lambda lengths, device: attention)
    config = TrainerConfig(tokens_per_microbatch=8192, tokens_per_logits=chunk, recompute=recompute)
    config = replace(config, lora=LoraConfig(rank))
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        torch.set_default_dtype(torch.bfloat16)
        model = Model(parse_shape(QWEN_7B, "test"))
        torch.set_default_dtype(torch.float32)
        trainer = Trainer(model, config, LossConfig(), SamplingConfig(), ALONE, 256, 1)
        live.peak = live.now
        trainer._score(model, examples)[0].sum().backward()
    told = f"trainer.recompute={recompute}", f"trainer.tokens_per_logits={chunk}", "rollout.max_response_tokens=256"
    told += (f"trainer.lora.rank={rank}",)
    made = plan(replace(planned(*told, ranks=1).demand, device=0))  # a CPU copies the output of attention once more
    names = "weights of the rollout", "weights without adapters", "masters", "gradients", "optimizer state"
    held = sum(made.lasting[name] for name in names) + sum(made.moments[made.worst].values())
    assert held == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sampling", "entropy"),
    [
        (SamplingConfig(), False),
        (SamplingConfig(0.7), False),
        (SamplingConfig(), True),
        (SamplingConfig(top_p=0.9), False),
        (SamplingConfig(0.7, 20, 0.9), True),
    ],
)
def test_the_logits_of_a_chunk_take_what_is_planned(memory: ModuleType, dtype, sampling, entropy) -> None:
    tokens, vocabulary = 64, 4096
    live, targets = memory.LiveBytes(), torch.zeros(tokens, dtype=torch.int64)
    with live:
        hidden, head = (torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (tokens, vocabulary))
        before = live.now

        def score_part(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return score(hidden @ head.T, targets, sampling, entropy)

        logprobs, entropies = checkpoint(score_part, hidden, use_reentrant=False)
        (logprobs.sum() + entropy * entropies.sum()).backward()
    made = planned(model=QWEN_7B | {"vocab_size": vocabulary})
    demand = replace(
        made.demand,
        itemsize=dtype.itemsize,
        logits_tokens=tokens,
        filters=sampling.truncates,
        scales=sampling.temperature != 1,
        entropy=entropy,
    )
    assert live.peak - before == pytest.approx(plan(demand).moments[SCORED][f"logits of {tokens} tokens"], rel=0.15)
