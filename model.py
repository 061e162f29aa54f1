"""One decoder for rollout and training: the Qwen2/2.5, Qwen3 and Llama families.

Tokens come packed, [T], without padding; attention is a callable, so training, prefill and decode differ only in
what they pass. Projections are fused (q|k|v and gate|up); `hf_tensors` names their parts as Hugging Face does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ConfigError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q [T,H,D], k [T,K,D], v [T,K,D]) -> [T,H,D]


@dataclass(frozen=True)
class ModelShape:
    """What a Hugging Face `config.json` says about the decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: dict  # rope_theta, rope_type and what the type needs
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _family_qwen2(c: dict) -> dict:
    return dict(qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def _family_qwen3(c: dict) -> dict:
    bias = c.get("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)


def _family_llama(c: dict) -> dict:
    bias = c.get("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False), qk_norm=False)


FAMILIES = {"qwen2": _family_qwen2, "qwen3": _family_qwen3, "llama": _family_llama}


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def parse_shape(c: dict, where: str) -> ModelShape:
    """Read a Hugging Face config with old or new keys. Raises ConfigError on what the decoder cannot do."""
    family = c.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type = {family!r} is not supported; plainroll has {', '.join(FAMILIES)}")
    missing = [
        k
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if k not in c
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}; is this a complete Hugging Face config.json?")
    bad = [f"{k} = {c[k]!r}" for k in SIZES if type(c[k]) is not int or c[k] < 1]
    if bad:
        raise ConfigError(f"{where}: {', '.join(bad)}: sizes are whole numbers over 0")
    if c.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config = {c['quantization_config']!r} is not supported; take the unquantised folder"
        )
    if c.get("use_sliding_window"):
        raise ConfigError(f"{where}: use_sliding_window = true is not supported; plainroll attends to the full context")
    if c.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act = {c['hidden_act']!r} is not supported; plainroll has silu")
    rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    rope.setdefault("rope_theta", c.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"{where}: rope_type = {rope['rope_type']!r} is not supported; plainroll has {', '.join(ROPE_TYPES)}"
        )
    missing = [key for key in ROPE_NEEDS[rope["rope_type"]] if key not in rope]
    if missing:
        raise ConfigError(
            f"{where}: rope_type = {rope['rope_type']!r} needs {', '.join(missing)} in its rope parameters"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{where}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; plainroll rotates all"
        )
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or (128 if family == "qwen3" else c["hidden_size"] // heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim = {head_dim} is not even; rotary positions turn pairs")
    return ModelShape(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=c.get("max_position_embeddings", 32768),
        norm_eps=c.get("rms_norm_eps", 1e-6),
        rope=rope,
        tied=c.get("tie_word_embeddings", False),
        **FAMILIES[family](c),
    )


def _rope_default(inv_freq: Tensor, rope: dict) -> Tensor:
    return inv_freq


def _rope_linear(inv_freq: Tensor, rope: dict) -> Tensor:
    return inv_freq / rope["factor"]


def _rope_llama3(inv_freq: Tensor, rope: dict) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended. (Llama 3.1 release)"""
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = context * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope["factor"]


ROPE_TYPES = {"default": _rope_default, "linear": _rope_linear, "llama3": _rope_llama3}


def rope_table(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [num_positions, head_dim / 2] float32 each."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    inv_freq = ROPE_TYPES[shape.rope["rope_type"]](1.0 / shape.rope["rope_theta"] ** exponent, shape.rope)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2). x [T, heads, D], cos and sin [T, 1, D/2]"""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, index: int):
        super().__init__()
        s, self.shape, self.index = shape, shape, index
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.qkv_proj = nn.Linear(s.hidden_size, q + 2 * kv, bias=s.qkv_bias)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=s.out_bias)
        self.gate_up_proj = nn.Linear(s.hidden_size, 2 * s.intermediate_size, bias=s.mlp_bias)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=s.mlp_bias)
        self.input_norm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.post_norm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.q_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None
        self.k_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        s = self.shape
        heads = self.qkv_proj(self.input_norm(x)).view(len(x), -1, s.head_dim)  # [T, H + 2K, D]
        qk, v = heads.split((s.num_heads + s.num_kv_heads, s.num_kv_heads), 1)
        if self.q_norm is not None:
            q, k = qk.split((s.num_heads, s.num_kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = apply_rope(qk, cos, sin).split((s.num_heads, s.num_kv_heads), 1)
        x = x + self.o_proj(attend(self.index, q, k, v).flatten(1))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Model(nn.Module):
    """A decoder whose `forward` returns hidden states and whose `logits` reads them out."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.head = None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return final hidden states. [T] int64, [T] int64 -> [T, hidden_size]"""
        cos, sin = self.rope(positions)
        x = self.embed(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size]"""
        return F.linear(hidden, self.embed.weight if self.head is None else self.head.weight)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.embed.weight
        if self._rope is None or self._rope[0].device != weight.device or self._rope[0].dtype != weight.dtype:
            cos, sin = rope_table(self.shape, self.shape.max_positions, weight.device)
            self._rope = cos[:, None].to(weight.dtype), sin[:, None].to(weight.dtype)
        return self._rope[0][positions], self._rope[1][positions]

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, view into our parameter): load by copying in, export by copying out."""
        s = self.shape
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        yield "model.embed_tokens.weight", self.embed.weight.data
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}"
            yield f"{at}.input_layernorm.weight", layer.input_norm.weight.data
            yield f"{at}.post_attention_layernorm.weight", layer.post_norm.weight.data
            if s.qk_norm:
                yield f"{at}.self_attn.q_norm.weight", layer.q_norm.weight.data
                yield f"{at}.self_attn.k_norm.weight", layer.k_norm.weight.data
            for linear, names, sizes in (
                (layer.qkv_proj, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
                (layer.o_proj, ("self_attn.o_proj",), (s.hidden_size,)),
                (layer.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj"), (s.intermediate_size, s.intermediate_size)),
                (layer.down_proj, ("mlp.down_proj",), (s.hidden_size,)),
            ):
                for kind, fused in linear.named_parameters():
                    for name, part in zip(names, fused.data.split(sizes), strict=True):
                        yield f"{at}.{name}.{kind}", part
        yield "model.norm.weight", self.norm.weight.data
        if self.head is not None:
            yield "lm_head.weight", self.head.weight.data
