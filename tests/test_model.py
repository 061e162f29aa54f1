"""The decoder equals `transformers`' in fp32, for every family, shape and config spelling; the rest is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import checkpoint
from attention import PackedAttention
from checkpoint import load_model
from config import ConfigError
from engine import kernels
from model import FAMILIES, ROPE_TYPES, Model, apply_rope, parse_shape

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
}
# A context this short and waves this fast make every part of the scaling visible within a test's lengths.
THETA = {"rope_type": "default", "rope_theta": 50.0}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
YARN_MORE = {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0}
SHAPES = {
    "qwen2 gqa 3": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 one kv head": {"model_type": "qwen2", "num_key_value_heads": 1, "rope_parameters": THETA},
    "qwen2 no gqa": {"model_type": "qwen2", "num_key_value_heads": 6, "rms_norm_eps": 1e-2},
    "qwen2 one layer": {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2},
    "qwen3 wide heads": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 narrow heads": {"model_type": "qwen3", "head_dim": 4, "tie_word_embeddings": True},
    "qwen3 bias": {"model_type": "qwen3", "head_dim": 10, "attention_bias": True, "rope_parameters": THETA},
    "llama": {"model_type": "llama"},
    "llama attention bias": {"model_type": "llama", "attention_bias": True},
    "llama mlp bias": {"model_type": "llama", "mlp_bias": True, "tie_word_embeddings": True},
    "llama both biases, wide heads": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 14},
    "llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "linear rope": {"model_type": "llama", "rope_parameters": LINEAR},
    "qwen2 linear rope": {"model_type": "qwen2", "rope_parameters": LINEAR},
    "yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "yarn, exact places, own scales": {"model_type": "llama", "head_dim": 16, "rope_parameters": YARN | YARN_MORE},
    "yarn, own factor": {"model_type": "llama", "rope_parameters": YARN | {"attention_factor": 1.7}},
    "dynamic rope, to the limit": {"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": DYNAMIC},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8} | MIXTURE,
    "qwen3_moe, one expert a token": {"model_type": "qwen3_moe", "head_dim": 8} | MIXTURE | {"num_experts_per_tok": 1},
    "qwen3_moe, weights as they are": {"model_type": "qwen3_moe", "tie_word_embeddings": True}
    | MIXTURE
    | {"norm_topk_prob": False, "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 7, "head_dim": 10, "tie_word_embeddings": True},
    "mistral window of one": {"model_type": "mistral", "sliding_window": 1},
    "phi3": {"model_type": "phi3"},
    "phi3 window": {"model_type": "phi3", "sliding_window": 7, "tie_word_embeddings": True},
    "qwen2 late windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3 windows by layer": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 23,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
LENGTHS = [5, 64, 1, 23, 23, 40, 2]


def make_oracle(changes: dict, folder: Path):
    """Write a `transformers` model whose every weight is random, norms and biases included; return it."""
    pad = {"pad_token_id": 0} if changes["model_type"] == "phi3" else {}  # its own is none of so few tokens
    config = AutoConfig.for_model(**{**SMALL, **pad, **changes})
    torch.manual_seed(7)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            size = 0.25 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn_like(parameter) * size)
    oracle.save_pretrained(folder)
    return oracle


def token_lists(vocab_size: int = SMALL["vocab_size"]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def packed_logits(model: Model, sequences: list[Tensor]) -> Tensor:
    """[all tokens, vocab_size], the sequences one after another"""
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model.logits(model(torch.cat(sequences), positions, PackedAttention(lengths, CPU)))


def oracle_logits(oracle, sequences: list[Tensor]) -> Tensor:
    return torch.cat([oracle(ids[None], use_cache=False).logits[0] for ids in sequences])


# ---- equal to transformers


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_packed_logits_equal_transformers_one_by_one(name, tmp_path):
    oracle = make_oracle(SHAPES[name], tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    sequences = token_lists()
    wanted = oracle_logits(oracle, sequences)
    assert wanted.std() > 0.5  # a model that says nothing proves nothing
    torch.testing.assert_close(packed_logits(model, sequences), wanted, atol=1e-4, rtol=0)


def test_every_family_and_rope_type_is_compared():
    compared = {changes["model_type"] for changes in SHAPES.values()}
    assert compared == FAMILIES.keys(), "add a shape of each family to SHAPES: it is compared with transformers"
    assert {c.get("rope_parameters", THETA)["rope_type"] for c in SHAPES.values()} == ROPE_TYPES.keys()


@pytest.mark.parametrize(
    "name", ["qwen2 tied", "qwen3 bias", "llama both biases, wide heads", "mistral window", "phi3 window", "qwen3_moe"]
)
def test_packed_gradients_equal_transformers(name, tmp_path):
    oracle = make_oracle(SHAPES[name], tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    sequences = token_lists()
    targets = torch.cat(sequences)[:, None]
    for logits in (packed_logits(model, sequences), oracle_logits(oracle, sequences)):
        logits.log_softmax(-1).gather(-1, targets).sum().backward()
    wanted = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    for name in [name for name in wanted if "experts" in name]:  # theirs are stacked
        at, kind = name.split(".experts.")
        for expert, own in enumerate(wanted.pop(name)):
            parts = zip(("gate_proj", "up_proj"), own.chunk(2)) if kind == "gate_up_proj" else [(kind, own)]
            wanted |= {f"{at}.experts.{expert}.{part}.weight": gradient for part, gradient in parts}
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that export names the gradients
    found = checkpoint._stored(model.export(), model.shape)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        size = wanted[key].abs().max().item()
        assert size > 1e-3, key
        torch.testing.assert_close(gradient, wanted[key], atol=2e-5 * size, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")


@torch.no_grad()
def test_joined_weights_are_joined_again_in_a_folder(tmp_path, monkeypatch) -> None:
    """Also over several files."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(checkpoint, "carried_files", lambda folder: [])
    oracle = make_oracle(SHAPES["phi3"], tmp_path / "theirs")
    checkpoint.save_model(tmp_path / "ours", load_model(tmp_path / "theirs", CPU, torch.float32), tmp_path / "theirs")
    assert len([*(tmp_path / "ours").glob("*.safetensors")]) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    found, wanted = again.state_dict(), oracle.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    with pytest.raises(
        ConfigError, match=r"gate_up_proj.weight has shape \[160, 48\], but config.json says \[144, 48\]"
    ):
        load_model(tmp_path / "ours", CPU, torch.float32)


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours(tmp_path):
    make_oracle(SHAPES["qwen2 gqa 3"], tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    first, *others = token_lists()
    alone = packed_logits(model, [first])
    packed = packed_logits(model, [others[0], first, *others[1:]])
    torch.testing.assert_close(packed[len(others[0]) :][: len(first)], alone, atol=1e-5, rtol=0)


def test_a_model_used_in_inference_mode_first_can_be_trained(tmp_path):
    make_oracle(SHAPES["qwen3 bias"], tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    with torch.inference_mode():
        packed_logits(model, token_lists())
    packed_logits(model, token_lists()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_and_training_turn_as_decoding_does(dtype):
    model = Model(parse_shape({**SMALL, "model_type": "qwen3", "head_dim": 8}, "here")).to(dtype)
    positions, (heads, size, page) = torch.randperm(128)[:40], (2, 8, 16)
    torch.manual_seed(2)
    qkv = torch.randn(40, heads, 5, size).to(dtype)  # of each KV head: 3 queries, its key, its value
    pages = torch.zeros(2, 40, heads, page, size, dtype=dtype)
    table = torch.arange(40, dtype=torch.int32)[:, None].expand(40, 8)  # a page for each row, at whatever place
    cos, sin = (x[:, 0, 0] for x in model.rope_tables())
    decoded = kernels.rope_and_write_torch(qkv.flatten(1), cos, sin, positions, table, *pages, 3 * heads, heads)
    turned = apply_rope(qkv[:, :, :-1], *model.rope(positions))
    assert turned.dtype == dtype
    assert torch.equal(turned[:, :, :-1].flatten(1, 2), decoded)
    assert torch.equal(turned[:, :, -1], pages[0, torch.arange(40), :, positions % page])


def test_bf16_stays_near_fp32(tmp_path):
    make_oracle(SHAPES["llama3 rope"], tmp_path)
    exact = packed_logits(load_model(tmp_path, CPU, torch.float32), token_lists())
    rough = packed_logits(load_model(tmp_path, CPU, torch.bfloat16), token_lists())
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).std() < 0.05 * exact.std()


# ---- spellings of config.json


def edit_config(folder: Path, **changes) -> None:
    """Change keys of config.json; a value of None removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


OLD_KEYS = {
    "plain": (THETA, {"rope_theta": 50.0}),
    "linear, type": (LINEAR, {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama3": (
        LLAMA3,
        {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ),
}


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f in FAMILIES for name in OLD_KEYS if f != "phi3" or name == "plain"]
)
@torch.no_grad()
@pytest.mark.slow
def test_old_and_new_config_keys_give_equal_logits(family, name, tmp_path):
    new, old = OLD_KEYS[name]
    experts = MIXTURE if family == "qwen3_moe" else {}  # its own is 128
    make_oracle({"model_type": family, "head_dim": 8, "rope_parameters": new} | experts, tmp_path)
    edit_config(tmp_path, torch_dtype=None, rope_theta=None, rope_scaling=None, rope_parameters=new, dtype="float32")
    wanted = packed_logits(load_model(tmp_path, CPU, torch.float32), token_lists())
    edit_config(tmp_path, rope_parameters=None, dtype=None, torch_dtype="float32", **old)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = packed_logits(load_model(tmp_path, CPU, torch.float32), token_lists())
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, oracle_logits(oracle, token_lists()), atol=1e-4, rtol=0)


def without(rope: dict, *keys: str) -> dict:
    return {key: value for key, value in rope.items() if key not in keys}


ORIGINAL = "original_max_position_embeddings"
MIXED_KEYS = {
    "an old key outweighs the new": {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "default"}},
    "the old key's theta is the one outside": {
        "rope_parameters": LINEAR,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_theta": 70.0,
    },
    "an empty old key": {"rope_parameters": LINEAR, "rope_scaling": {}},
    "an old key without a value": {"rope_parameters": LINEAR, "rope_scaling": None},
    "theta inside and outside": {"rope_parameters": LINEAR, "rope_theta": 70.0},
    "theta outside": {"rope_parameters": without(LINEAR, "rope_theta"), "rope_theta": 70.0},
    "no theta": {"rope_parameters": without(LINEAR, "rope_theta")},
    "theta only": {"rope_parameters": {}, "rope_theta": 70},
    "type and rope_type": {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
    "llama3, context outside": {"rope_parameters": without(LLAMA3, ORIGINAL), ORIGINAL: 32},
    "llama3, context inside and outside": {"rope_parameters": LLAMA3, ORIGINAL: 64},
    "llama3, context of max_position_embeddings": {"rope_parameters": without(LLAMA3, ORIGINAL)},
    "llama3, old key, context outside": {"rope_scaling": without(LLAMA3, ORIGINAL), ORIGINAL: 32},
    "linear, context outside": {"rope_parameters": LINEAR, ORIGINAL: 64},
    "every layer attends to all": {"layer_types": ["full_attention"] * 3, "rope_parameters": LINEAR},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED_KEYS)
@torch.no_grad()
def test_rope_keys_that_compete_mean_what_transformers_takes_them_for(name, tmp_path):
    families = [family for family in FAMILIES if family != "phi3"]  # whose rope is plain (tests/test_families.py)
    family = families[list(MIXED_KEYS).index(name) % len(families)]
    make_oracle({"model_type": family, "head_dim": 8} | (MIXTURE if family == "qwen3_moe" else {}), tmp_path)
    path = tmp_path / "config.json"
    plain = without(json.loads(path.read_text()), "rope_parameters", "layer_types")
    path.write_text(json.dumps(plain | MIXED_KEYS[name]))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = packed_logits(load_model(tmp_path, CPU, torch.float32), token_lists())
    torch.testing.assert_close(found, oracle_logits(oracle, token_lists()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_takes_for_them(family):
    config = without(SMALL, "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    config |= MIXTURE if family == "qwen3_moe" else {}
    shape = parse_shape({"model_type": family, **config}, "here")
    kv_heads = 6 if family in ("mistral", "qwen3_moe") else None  # whose own defaults do not depend on the heads
    theirs = AutoConfig.for_model(family, **config, num_key_value_heads=kv_heads)
    assert shape.head_dim == getattr(theirs, "head_dim", SMALL["hidden_size"] // SMALL["num_attention_heads"])
    assert shape.num_kv_heads == theirs.num_key_value_heads == 6
    assert shape.max_positions == theirs.max_position_embeddings
    assert shape.norm_eps == theirs.rms_norm_eps
    assert shape.rope["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert shape.tied == theirs.tie_word_embeddings
    assert shape.window(0) == (getattr(theirs, "sliding_window", None) or 0)


# ---- refusals


@pytest.mark.parametrize(
    "changes, value, remedy",
    [
        ({"model_type": "gpt2"}, "'gpt2'", "qwen2, qwen3, qwen3_moe, llama"),
        ({"model_type": None}, "None", "qwen2, qwen3, qwen3_moe, llama"),
        ({"use_sliding_window": True}, "use_sliding_window = True", "full context"),
        ({"hidden_act": "gelu"}, "'gelu'", "silu"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "'su'", "default, linear, dynamic, yarn, llama3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'", "default, linear, dynamic, yarn, llama3"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'", "factor"),
        ({"model_type": "phi3", "rope_parameters": YARN}, "'yarn'", "plainroll has default"),
        ({"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast = -1", "a number over 0"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": -5}, "-5", "sizes are whole numbers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "2"}, "'2'", "number of layers"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "sliding_attention", "full context"),
        ({"layer_types": ["full_attention"] * 2}, "2 entries", "3 layers"),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size", "complete Hugging Face config.json"),
        # What would otherwise load and compute something else, or stop deep inside with a traceback.
        ({"rope_parameters": {"rope_type": "linear"}}, "factor", "rope"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor", "rope"),
        ({"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, "0.5", "partial_rotary_factor"),
        ({"rope_parameters": THETA, "rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su'", "default, linear"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "full_attention", "one rope for all layers"),
        ({"rope_scaling": {**THETA, "sliding_attention": LINEAR}}, "sliding_attention", "one rope for all layers"),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": -32}, "-32", "a number over 0"),
        ({"rope_parameters": LINEAR, "partial_rotary_factor": 0.5}, "0.5", "partial_rotary_factor"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "sliding_attention", "full context"),
        ({"layer_types": 3}, "layer_types = 3", "full context"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size", "complete Hugging Face config.json"),
        ({"model_type": "qwen3_moe", **MIXTURE, "mlp_only_layers": [1]}, "[1]", "experts in every layer"),
        ({"model_type": "qwen3_moe", **MIXTURE, "decoder_sparse_step": 2}, "= 2", "experts in every layer"),
        ({"model_type": "qwen3_moe", **MIXTURE, "num_experts": 300}, "300", "at most 256"),
        ({"model_type": "qwen3_moe", **MIXTURE, "num_experts_per_tok": 9}, "= 9", "at most num_experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8", "quantization_config"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads = 4", "num_attention_heads"),
        ({"head_dim": 7}, "head_dim = 7", "even"),
        ({"hidden_size": "48"}, "'48'", "hidden_size"),
    ],
    ids=str,
)
def test_what_the_decoder_cannot_do_is_refused(changes, value, remedy):
    config = {"model_type": "llama", **SMALL, **changes}
    config = {key: entry for key, entry in config.items() if entry is not None}
    with pytest.raises(ConfigError) as caught:
        parse_shape(config, "some/config.json")
    text = str(caught.value)
    assert text.startswith("some/config.json: ") and value in text and remedy in text
