"""One decoder for rollout and training: the Qwen2/2.5, Qwen3, Qwen3-MoE, Llama, Mistral and Phi-3 families.

Tokens come packed, [T], without padding; attention is a callable, so training, prefill and decode differ only in
what they pass. Projections are fused (q|k|v and gate|up); `hf_tensors` names their parts as Hugging Face does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config import ConfigError
from core import ModelShape
from engine import experts, gradients, kernels, native
from engine.experts import Choose, own_choice
from parallel import World

# (layer, q [T, H, D], k [T, K, D], v [T, K, D], newest tokens to attend to or 0 for all) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]
Reduce = Callable[[Tensor], Tensor]
# A name of Hugging Face, a view of our weight, and the shape there. The view has the elements in Hugging Face's order,
# but may have more dimensions: reshape one to the other.
HFTensor = tuple[str, Tensor, tuple[int, ...]]


# From a config, with which biases and norms a family has, and which layers attend to how much.
FAMILIES: dict[str, Callable[[dict], dict[str, Any]]] = {
    "qwen2": lambda c: dict(qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False) | _late_windows(c),
    "qwen3": lambda c: _attention_bias(c) | dict(mlp_bias=False, qk_norm=True) | _late_windows(c),
    "qwen3_moe": lambda c: _attention_bias(c) | dict(mlp_bias=False, qk_norm=True) | _experts(c),
    "llama": lambda c: _attention_bias(c) | dict(mlp_bias=c.get("mlp_bias", False), qk_norm=False),
    "mistral": lambda c: _attention_bias({}) | dict(mlp_bias=False, qk_norm=False) | _windows(c),
    "phi3": lambda c: (
        _attention_bias({})
        | dict(mlp_bias=False, qk_norm=False, stored_joined=True)
        | _windows({"sliding_window": None} | c)
    ),
}
MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "phi3": 4096}  # where a config does not say; others: 32768


def _attention_bias(c: dict) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "out_bias"), c.get("attention_bias", False))


def _experts(c: dict) -> dict[str, int]:
    names = ("num_experts", "experts_per_token", "intermediate_size")
    sizes = {name: c[key] for name, key in zip(names, MIXTURE_SIZES)}
    return sizes | {"normalise_experts": bool(c.get("norm_topk_prob"))}


def _windows(c: dict, kinds: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """`kinds` of the layers; none: all have a window."""
    window = c.get("sliding_window", 4096) or 0
    kinds = kinds or [SLIDING] * c["num_hidden_layers"]
    return {"windows": tuple(window * (kind == SLIDING) for kind in kinds) if window else ()}


def _late_windows(c: dict) -> dict[str, tuple[int, ...]]:
    """Of Qwen: the first layers attend to all, as many as the config says."""
    layers = c["num_hidden_layers"]
    default = [SLIDING if i >= c.get("max_window_layers", 28) else "full_attention" for i in range(layers)]
    return _windows(c, c.get("layer_types") or default) if c.get("use_sliding_window") else {}


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
MIXTURE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
LARGEST, MOST_LAYERS, MOST_EXPERTS = 2**31 - 1, 1000, 256  # a recorded choice is a byte
SLIDING = "sliding_attention"  # a kind of layer
ORIGINAL = "original_max_position_embeddings"


def parse_shape(c: dict, where: str) -> ModelShape:
    """Read a Hugging Face config with old or new keys. Raises ConfigError on what the decoder cannot do."""
    family = c.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"{where}: model_type = {family!r} is not supported; plainroll has {', '.join(FAMILIES)}")
    is_mixture = family == "qwen3_moe"
    if is_mixture and "num_local_experts" in c:
        c = {"num_experts": c["num_local_experts"]} | c
    sizes = (*SIZES, *MIXTURE_SIZES) if is_mixture else SIZES
    if missing := [k for k in sizes if k not in c]:
        raise ConfigError(f"{where}: missing {', '.join(missing)}; is this a complete Hugging Face config.json?")
    given = [k for k in OPTIONAL_SIZES if c.get(k) is not None]
    if bad := [f"{k} = {c[k]!r}" for k in (*sizes, *given) if type(c[k]) is not int or not 0 < c[k] <= LARGEST]:
        raise ConfigError(f"{where}: {', '.join(bad)}: sizes are whole numbers over 0 and at most {LARGEST}")
    if isinstance(kinds := c.get("layer_types"), list) and len(kinds) != c["num_hidden_layers"]:
        raise ConfigError(f"{where}: layer_types has {len(kinds)} entries for {c['num_hidden_layers']} layers")
    if c["num_hidden_layers"] > MOST_LAYERS:
        raise ConfigError(f"{where}: num_hidden_layers = {c['num_hidden_layers']} is too many: at most {MOST_LAYERS}")
    _refuse(c, where, is_mixture)
    rope = _parse_rope(c, where)
    eps = c.get("rms_norm_eps", 1e-5 if family == "phi3" else 1e-6)
    _check_number(where, "rms_norm_eps", eps)
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or (128 if family == "qwen3" else c["hidden_size"] // heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim = {head_dim} is not even; rotary positions turn pairs")
    values: dict[str, Any] = dict(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(c, rope),
        norm_eps=eps,
        rope=rope,
        tied=bool(c.get("tie_word_embeddings")),
    )
    return ModelShape(**values | FAMILIES[family](c))


def _refuse(c: dict, where: str, is_mixture: bool) -> None:
    """Raise ConfigError for what the decoder does not have."""
    kinds, slides = c.get("layer_types") or [], c["model_type"] in ("qwen2", "qwen3")
    known = ("full_attention", SLIDING) if slides and c.get("use_sliding_window") else ("full_attention",)
    full, every = "plainroll attends to the full context", "plainroll has experts in every layer"
    for key, is_bad, remedy in (
        ("quantization_config", bool(c.get("quantization_config")), "take the unquantised folder"),
        ("use_sliding_window", bool(c.get("use_sliding_window")) and not slides, full),
        ("layer_types", not isinstance(kinds, list) or any(kind not in known for kind in kinds), full),
        ("max_window_layers", type(c.get("max_window_layers", 0)) is not int, "it is a number of layers"),
        ("mlp_only_layers", is_mixture and bool(c.get("mlp_only_layers")), every),
        ("decoder_sparse_step", is_mixture and c.get("decoder_sparse_step", 1) != 1, every),
        ("num_experts", is_mixture and c["num_experts"] > MOST_EXPERTS, f"at most {MOST_EXPERTS}"),
        ("num_experts_per_tok", is_mixture and c["num_experts_per_tok"] > c["num_experts"], "at most num_experts"),
        ("hidden_act", c.get("hidden_act", "silu") != "silu", "plainroll has silu"),
    ):
        if is_bad:
            raise ConfigError(f"{where}: {key} = {c[key]!r} is not supported; {remedy}")


def _parse_rope(c: dict, where: str) -> dict:
    """Return rope_theta, rope_type and what the type needs, from the keys that `transformers` would take."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # an old key, added by hand, wins as a whole
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: rope parameters = {rope!r} are not a table of names and values")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"{where}: rope parameters of their own for {', '.join(nested)} are not supported; plainroll has one rope "
            "for all layers"
        )
    rope = {"rope_theta": c.get("rope_theta", 10000.0), "partial_rotary_factor": c.get("partial_rotary_factor")} | rope
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    known = ["default"] if c["model_type"] == "phi3" else [*ROPE_TYPES]  # there yarn means longrope
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(f"{where}: rope_type = {kind!r} is not supported; plainroll has {', '.join(known)}")
    if (partial := rope.pop("partial_rotary_factor")) not in (None, 1.0):
        raise ConfigError(f"{where}: partial_rotary_factor = {partial!r} is not supported; plainroll rotates all")
    _, needs = ROPE_TYPES[kind]
    if ORIGINAL in needs:
        rope[ORIGINAL] = c[ORIGINAL] if ORIGINAL in c else rope.get(ORIGINAL, _own_positions(c))
    if missing := [key for key in needs if key not in rope]:
        raise ConfigError(f"{where}: rope_type = {kind!r} needs {', '.join(missing)} in its rope parameters")
    given = [key for key in YARN if kind == "yarn" and rope.get(key) is not None]
    for key in ("rope_theta", *needs, *given):
        _check_number(where, key, rope[key])
    return rope


def _max_positions(c: dict, rope: dict) -> int:
    stretched = rope[ORIGINAL] * rope["factor"] if rope["rope_type"] == "yarn" else 0
    return max(_own_positions(c), int(stretched))


def _own_positions(c: dict) -> int:
    return c.get("max_position_embeddings") or MAX_POSITIONS.get(c["model_type"], 32768)


def _check_number(where: str, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} = {value!r} is not a number over 0")


def _rope_llama3(inv_freq: Tensor, rope: dict) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended. (Llama 3.1 release)"""
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope[ORIGINAL]
    turns = context * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope["factor"]


def _rope_yarn(inv_freq: Tensor, rope: dict) -> Tensor:
    """As llama3, but the blend goes by the place of a wave among all. (YaRN, arXiv 2309.00071, section 3.2)"""
    half, (fast, slow) = len(inv_freq), (rope.get(key) or turns for key, turns in (("beta_fast", 32), ("beta_slow", 1)))

    def place(turns: float) -> float:  # of the wave that turns so often within the original context
        return half * math.log(rope[ORIGINAL] / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    low, high = place(fast), place(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    stretch = (torch.arange(half, device=inv_freq.device) - low) / (high - low or 0.001)
    return torch.lerp(inv_freq, inv_freq / rope["factor"], stretch.clamp(0, 1))


YARN = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")  # parameters that it may have


def _yarn_scale(rope: dict) -> float:
    """Return what queries and keys are multiplied by: longer contexts make attention softer. (section 3.4)"""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if given := rope.get("attention_factor"):
        return given
    one, other = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    return scale(one) / scale(other) if one and other else scale(1.0)


# The frequencies of a type, and the parameters that they need.
ROPE_TYPES: dict[str, tuple[Callable[[Tensor, dict], Tensor], tuple[str, ...]]] = {
    "default": (lambda inv_freq, rope: inv_freq, ()),
    "linear": (lambda inv_freq, rope: inv_freq / rope["factor"], ("factor",)),
    # Beyond `max_position_embeddings`, where plainroll does not go, they would change with the length of the sequence.
    "dynamic": (lambda inv_freq, rope: inv_freq, ("factor",)),
    "yarn": (_rope_yarn, ("factor", ORIGINAL)),
    "llama3": (_rope_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
}


def rope_table(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [num_positions, head_dim / 2] float32 each."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies, _ = ROPE_TYPES[shape.rope["rope_type"]]
    inv_freq = frequencies(1.0 / shape.rope["rope_theta"] ** exponent, shape.rope)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
    scale = _yarn_scale(shape.rope) if shape.rope["rope_type"] == "yarn" else 1.0
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2). x [..., D]; cos and sin broadcast to it, sin negative in the first half.

    In fp32, rounded once, as `kernels.rope_and_write`: decoding and training must see the same queries and keys.
    """
    wide = x.float()  # 3 operations: 8 % less of a small decode step
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def split_heads(heads: Tensor, cos: Tensor, sin: Tensor, normed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, the first two rotated. [T, K, groups + 2, D] -> [T, K * groups, D], [T, K, D] twice

    `normed`: of models with such norms, q and k [T, K, groups + 1, D] after them.
    """
    qk, v = heads.split_with_sizes((heads.shape[2] - 1, 1), 2)
    if native.can_rope(heads, cos, sin):
        return gradients.rope(heads if normed is None else torch.cat((normed, v), 2), cos, sin)
    q, k = apply_rope(qk if normed is None else normed, cos, sin).split_with_sizes((heads.shape[2] - 2, 1), 2)
    return q.flatten(1, 2), k[:, :, 0], v[:, :, 0]


Weight = Any  # a Tensor, or a callable in its place (`engine.cpu.Packed`)


class LayerWeights(NamedTuple):
    """The tensors of one layer, or one tensor-parallel rank's shard of them.

    Rows of `qkv` go by KV head: its G query heads, its key, its value. Rows of `gate_up` go in blocks: part of gate,
    the same part of up. So the shard of a rank is one run of rows, a view that costs nothing.
    """

    qkv: Weight  # [K * (G + 2) * D, hidden]
    qkv_bias: Tensor | None
    out: Weight  # [hidden, H * D]
    out_bias: Tensor | None
    gate_up: Weight  # [blocks * 2 * I / blocks, hidden]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, I]
    down_bias: Tensor | None
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    router: Tensor | None  # [experts, hidden]; then gate_up is [experts, 2 * I, hidden], and down [experts, hidden, I]

    def shard(self, split: "Split") -> "LayerWeights":
        """Return a rank's part: views, but for `qkv` when ranks outnumber KV heads."""
        s, rank, size = split.shape, split.rank, split.size  # of a mixture a rank has whole experts
        w = LayerWeights._make(t.detach() if t is not None else None for t in self)

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.chunk(size)[rank]

        def heads(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or size <= s.num_kv_heads:
                return rows(tensor)
            per_kv = size // s.num_kv_heads
            own = tensor.view(s.num_kv_heads, -1, s.head_dim, *tensor.shape[1:])[rank // per_kv]  # [G + 2, D, ...]
            queries = own[:-2].chunk(per_kv)[rank % per_kv]
            return torch.cat((queries, own[-2:])).flatten(0, 1)

        return w._replace(
            qkv=heads(w.qkv),
            qkv_bias=heads(w.qkv_bias),
            out=w.out.chunk(size, 1)[rank],
            out_bias=w.out_bias if rank == 0 else None,  # added once, before the sum over ranks
            gate_up=rows(w.gate_up),
            gate_up_bias=rows(w.gate_up_bias),
            down=w.down.chunk(size, 0 if s.num_experts else 1)[rank],
            down_bias=w.down_bias if rank == 0 else None,
        )


@dataclass(frozen=True)
class Split:
    """Which part of each layer a tensor-parallel rank computes. Rank r of `size`."""

    shape: ModelShape
    rank: int = 0
    size: int = 1

    @cached_property  # read for each layer of each step
    def num_kv_heads(self) -> int:
        return max(self.shape.num_kv_heads // self.size, 1)  # fewer KV heads than ranks: each has a copy of one

    @cached_property
    def groups(self) -> int:
        return self.shape.num_heads // self.size // self.num_kv_heads  # query heads of one KV head

    @cached_property
    def mlp_blocks(self) -> int:
        return self.shape.mlp_blocks // self.size


def check_split(shape: ModelShape, size: int) -> None:
    """Raise ConfigError when `size` ranks cannot share the layers."""
    possible = [n for n in (1, 2, 4, 8) if can_split(shape, n)]
    if not can_split(shape, size):
        raise ConfigError(
            f"tensor parallelism over {size} ranks does not divide {shape.num_heads} heads, {shape.num_kv_heads} "
            f"KV heads and {shape.num_experts or shape.intermediate_size} "
            f"{'experts' if shape.num_experts else 'intermediate rows'}; possible here: {possible}"
        )


def can_split(shape: ModelShape, size: int) -> bool:
    kv, mlp = shape.num_kv_heads, shape.num_experts or shape.mlp_blocks
    return not (shape.num_heads % size or (kv % size and size % kv) or mlp % size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, inference: bool) -> Tensor:
    """Normalise the last dimension. [..., n], [n] -> [..., n]"""
    if inference and x.dim() == 2 and kernels.is_fused(x):
        return kernels.add_rms_norm(x, None, weight, eps)[0]
    return F.rms_norm(x, weight.shape, weight, eps) if inference else gradients.rms_norm(x, weight, eps)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor):
        return weight(x, bias)
    return (gradients.linear if torch.is_grad_enabled() else gradients.product)(x, weight, bias)


def run_layer(
    w: LayerWeights,
    split: Split,
    index: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    reduce: Reduce = lambda part: part,
    choose: Choose = own_choice,
    *,
    inference: bool,
) -> Tensor:
    """One decoder layer over a rank's share of the heads and of the MLP. x [T, hidden] -> [T, hidden]

    `choose`: of a mixture, decides which experts a token takes.

    `inference`: the caller wants no gradients, so kernels without a backward pass take over what they can.
    """
    s, groups, eps = split.shape, split.groups, split.shape.norm_eps
    normed = rms_norm(x, w.input_norm, eps, inference)
    heads = linear(normed, w.qkv, w.qkv_bias).view(-1, split.num_kv_heads, groups + 2, s.head_dim)
    normed_qk = None
    if w.q_norm is not None and w.k_norm is not None:
        q, k, _ = heads.split_with_sizes((groups, 1, 1), 2)
        normed_qk = torch.cat((rms_norm(q, w.q_norm, eps, inference), rms_norm(k, w.k_norm, eps, inference)), 2)
    q, k, v = split_heads(heads, cos, sin, normed_qk)
    attended = attend(index, q, k, v, s.window(index))  # [T, H, D]
    x = x + reduce(linear(attended.flatten(1), w.out, w.out_bias))
    normed = rms_norm(x, w.post_norm, eps, inference)
    return x + reduce(run_mlp(w, split, index, normed, choose, inference))


def run_mlp(w: LayerWeights, split: Split, index: int, x: Tensor, choose: Choose, inference: bool) -> Tensor:
    """A rank's share of the MLP, or its experts' share of the mixture. x [T, hidden] -> [T, hidden]"""
    silu_mul = kernels.silu_mul if inference else gradients.silu_mul
    if w.router is None:
        activated = silu_mul(linear(x, w.gate_up, w.gate_up_bias), split.mlp_blocks)
        return linear(activated, w.down, w.down_bias)
    s = split.shape
    logits = F.linear(x, w.router)
    chosen, weights = experts.weigh(logits, s.experts_per_token, s.normalise_experts, index, choose)
    return experts.mix(x, w.gate_up, w.down, chosen, weights, split.rank * len(w.gate_up), silu_mul)


class Experts(nn.Module):
    """The same projection of each expert. weight [experts, out, in]"""

    bias = None

    def __init__(self, num_experts: int, size_in: int, size_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, size_out, size_in))
        nn.init.uniform_(self.weight, -(size_in**-0.5), size_in**-0.5)  # as nn.Linear


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, index: int):
        super().__init__()
        s, self.split, self.index = shape, Split(shape), index
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.qkv_proj = nn.Linear(s.hidden_size, q + 2 * kv, bias=s.qkv_bias)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=s.out_bias)
        mlp = partial(Experts, s.num_experts) if s.num_experts else partial(nn.Linear, bias=s.mlp_bias)
        self.gate_up_proj: Any = mlp(s.hidden_size, 2 * s.intermediate_size)
        self.down_proj: Any = mlp(s.intermediate_size, s.hidden_size)
        self.router = nn.Linear(s.hidden_size, s.num_experts, bias=False) if s.num_experts else None
        self.input_norm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.post_norm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.q_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None
        self.k_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else None
        self.adapted: dict[str, Callable[..., Tensor]] = {}  # by name of a weight: what takes its place in training

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, inference: bool, choose: Choose = own_choice
    ) -> Tensor:
        w = self.weights()
        if self.adapted and torch.is_grad_enabled():
            places: dict[str, Weight] = {name: partial(of, getattr(w, name)) for name, of in self.adapted.items()}
            w = w._replace(**places)
        return run_layer(w, self.split, self.index, x, cos, sin, attend, choose=choose, inference=inference)

    def weights(self) -> LayerWeights:
        projections = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm, self.router)
        parts = [tensor for p in projections for tensor in (p.weight, p.bias)]
        return LayerWeights._make([*parts, *(n.weight if n else None for n in norms)])


class Model(nn.Module):
    """A decoder whose `forward` returns hidden states and whose `logits` reads them out."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers: Any = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.head = None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None
        self.compute_dtype: torch.dtype | None = None  # of a forward, where the weights are masters; None: the weights'
        self.shards: World | None = None  # the ranks over which the weights lie; None: they are whole
        self.recompute = False  # in the backward pass, instead of keeping what a layer computed

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        inference: bool = False,
        choose: Choose = own_choice,
    ) -> Tensor:
        """Return final hidden states. [T] int64, [T] int64 -> [T, hidden_size]. The rest: as for `run_layer`."""
        assert not (inference and torch.is_grad_enabled()), "some of the kernels have no backward pass"
        cos, sin = self.rope(positions)
        x = self.embed(token_ids)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, inference, choose, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend, inference, choose)
        return rms_norm(x, self.norm.weight, self.shape.norm_eps, inference=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size]"""
        return linear(hidden, self.head_weight, None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that a forward computes in."""
        return self.compute_dtype or self.embed.weight.dtype

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at `positions` as `apply_rope` wants them, [T, 1, 1, head_dim] each."""
        cos, sin = (table[positions] for table in self.rope_tables())
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all positions, [max_positions, 1, 1, head_dim / 2] each."""
        device, dtype = self.embed.weight.device, self.dtype
        if self._rope is None or self._rope[0].device != device or self._rope[0].dtype != dtype:
            cos, sin = rope_table(self.shape, self.shape.max_positions, device)
            self._rope = cos[:, None, None].to(dtype), sin[:, None, None].to(dtype)
        return self._rope

    def export(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name, in their shapes there; copies where our layout differs."""
        return {name: view.reshape(like) for name, view, like in self.hf_tensors()}

    def hf_tensors(self) -> Iterator[HFTensor]:
        """Yield the Hugging Face tensors in our weights: load by copying into the views, export by copying out."""
        for weight, parts in self.hf_parts():
            yield from parts(weight.data)

    def hf_parts(self) -> Iterator[tuple[Tensor, Callable[[Tensor], list[HFTensor]]]]:
        """Yield each weight, and a function from a tensor like the weight to the Hugging Face tensors in it.

        So weights that lie over several ranks can be whole one at a time.
        """
        s = self.shape
        yield self.embed.weight, partial(_whole, "model.embed_tokens.weight")
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}"
            norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
            norms |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm} if s.qk_norm else {}
            for name, norm in norms.items():
                yield norm.weight, partial(_whole, f"{at}.{name}.weight")
            for kind, weight in layer.qkv_proj.named_parameters():  # [K, G + 2, D, ...]
                places, sizes = {"q": slice(-2), "k": -2, "v": -1}, (s.num_kv_heads, -1, s.head_dim)
                yield weight, partial(_fused, f"{at}.self_attn", kind, places, sizes)
            modules = {"self_attn.o_proj": layer.o_proj}
            if layer.router is not None:
                modules |= {"mlp.gate": layer.router}
                for names, mlp in ((("gate", "up"), layer.gate_up_proj), (("down",), layer.down_proj)):
                    yield mlp.weight, partial(_each_expert, f"{at}.mlp.experts", names)
            else:
                modules |= {"mlp.down_proj": layer.down_proj}
                for kind, weight in layer.gate_up_proj.named_parameters():  # [blocks, gate | up, I / blocks, ...]
                    places, sizes = {"gate": 0, "up": 1}, (s.mlp_blocks, 2, -1)
                    yield weight, partial(_fused, f"{at}.mlp", kind, places, sizes)
            for name, module in modules.items():
                for kind, weight in module.named_parameters():
                    yield weight, partial(_whole, f"{at}.{name}.{kind}")
        yield self.norm.weight, partial(_whole, "model.norm.weight")
        if self.head is not None:
            yield self.head.weight, partial(_whole, "lm_head.weight")


JOINED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


def stored_name(shape: ModelShape, name: str) -> str:
    """Return the weight of a folder that has a tensor of `hf_tensors`: alone, or rows of several, in that order."""
    parts = name.split(".")
    return ".".join(JOINED.get(part, part) for part in parts) if shape.stored_joined else name


def empty_model(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Model:
    """Return a model without memory, on torch's meta device."""
    with torch.device("meta"):
        return Model(shape).to(dtype)


def _whole(name: str, tensor: Tensor) -> list[HFTensor]:
    return [(name, tensor, tuple(tensor.shape))]


def _fused(at: str, kind: str, places: dict[str, Any], sizes: tuple[int, ...], fused: Tensor) -> list[HFTensor]:
    rows, rest = fused.view(*sizes, *fused.shape[1:]), fused.shape[1:]
    return [(f"{at}.{name}_proj.{kind}", rows[:, place], (-1, *rest)) for name, place in places.items()]


def _each_expert(at: str, names: tuple[str, ...], stacked: Tensor) -> list[HFTensor]:
    """[experts, rows of all names, in]"""
    return [
        (f"{at}.{expert}.{name}_proj.weight", part, tuple(part.shape))
        for expert, rows in enumerate(stacked)
        for name, part in zip(names, rows.chunk(len(names)), strict=True)
    ]
