"""The memory of one rank: all that lasts, its worst moment, and what that leaves for KV pages. Pure arithmetic.

`train.py --check` prints the plan; a run on a GPU gives its pages the rest. benchmarks/memory.py holds it to measured
memory. h: hidden size, I: intermediate size, q: all heads' queries, T: tokens of the largest micro-batch, b: bytes of a
number in the model's dtype; masters, gradient sums and optimizer state are fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from core import ModelShape
from engine.pages import Cache

GIB = 2**30
# Not measured yet, for want of a GPU:
CONTEXT = GIB // 2  # of CUDA, with its libraries and kernels
COMMUNICATOR = GIB // 2 + 2**22  # of NCCL, for each group of ranks (544 to 688 MB in nccl issue 964); memory to sum in
GRAPH_LAYER = 2**18  # of a captured decode step, for each layer
FREE = 0.03  # share of a GPU that stays free: blocks of freed memory do not fit every tensor
BUCKET = 64 * 2**20  # of gradients that are summed over ranks, or weights that are sent, at a time
KV_SHARE = 0.25  # of a GPU's memory, for KV pages: with less beside whole weights, `auto` shards them
PARTS = "parts of the weights to train with"  # where adapters are trained, and weights lie over several ranks
GATHERED_TOKENS = 2**16  # most whose keys and values of a layer are copied from pages at once, if of several contexts
ENOUGH = 32  # of the longest sequences, in the pages of a replica: with fewer a decode step is as slow, for less


@dataclass(frozen=True)
class Demand:
    """What the memory of a rank depends on."""

    shape: ModelShape
    itemsize: int  # b
    cache: Cache
    tokens: int  # T
    logits_tokens: int  # whose logits are held at once
    recompute: bool
    num_ranks: int = 1
    shard: int = 1
    offload: bool = False  # the optimizer's state waits in host memory
    has_reference: bool = False
    adapters: int = 0  # numbers in adapters (LoRA), of which every rank has all; 0: the model itself is trained
    adapted: int = 0  # numbers in weights with adapters
    largest_adapted: int = 0  # of them, in one weight
    filters: bool = False  # top-k, top-p or min-p
    entropy: bool = False  # has a gradient
    scales: bool = False  # temperature is not 1
    tensor_parallel: int = 1
    layout: str = "whole"  # of the rollout's weights over the ranks of a replica, or auto
    step_tokens: int = 8192  # of one forward of the rollout
    graphs: int = 0  # CUDA graphs
    communicators: int = 0
    outside: float = 0.0  # bytes of the device that others have
    judge: float = 0.0  # bytes
    teacher: float = 0.0  # bytes that it holds all the time,
    teaching: float = 0.0  # and in a forward
    packed: bool = False  # a CPU decodes with a second copy of large weights
    compiled: bool = False  # a CPU trains by the kernels of engine/gradients.py
    device: float = 0.0  # bytes of a GPU; 0: a CPU
    kv: float = 0.0  # bytes of KV pages; 0: what the rest leaves
    trains: bool = True
    decodes: bool = True

    @property
    def matrix_numbers(self) -> int:
        """Numbers in the matrices of one layer; biases and norms are too few to count."""
        s, heads = self.shape, (2 * self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim
        return s.hidden_size * heads + s.mlp_numbers

    @property
    def embedding_numbers(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def end_numbers(self) -> int:
        """Numbers in the embedding and in the head: the root of FSDP's modules."""
        return self.embedding_numbers * (1 if self.shape.tied else 2)

    @property
    def numbers(self) -> int:
        return self.shape.num_layers * self.matrix_numbers + self.end_numbers

    @property
    def trained(self) -> float:
        """Numbers that have a master, a gradient and optimizer state on a rank."""
        return self.trains * (self.adapters or self.numbers / self.shard)

    @property
    def weights(self) -> int:
        """Bytes of the rollout's weights over all ranks of a replica."""
        return self.numbers * self.itemsize


Lines = dict[str, float]  # bytes by what they are for


@dataclass(frozen=True)
class Plan:
    demand: Demand
    lasting: Lines
    moments: dict[str, Lines]  # what comes on top of it, one moment at a time
    layout: str  # of the rollout's weights: whole or sharded

    @property
    def worst(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def wanted(self) -> float:
        """Bytes of all but KV pages, at the worst moment."""
        return sum(self.lasting.values()) + sum(self.moments[self.worst].values())

    @property
    def host(self) -> float:
        """Bytes of host memory that take the rank's state while another job has its device (`Job.release`)."""
        d, kept = self.demand, ("weights of the rollout", "weights of the reference", PARTS, "masters", "gradients")
        return sum(self.lasting[name] for name in kept) + 8 * d.trained + _base(d)

    @property
    def kv(self) -> float:
        """Bytes of KV pages: as many as were asked for, else the rest. None where only others decode."""
        d = self.demand
        return d.decodes * (d.kv or max(d.device - self.wanted, 0.0))

    @property
    def least_kv(self) -> float:
        """Bytes of the pages that were asked for, else of one full sequence. None where only others decode."""
        return self.demand.decodes * (self.demand.kv or self.kv_of_longest)

    @property
    def kv_of_longest(self) -> float:
        """Bytes of the pages of one full sequence."""
        return self.demand.cache.pages_of_longest * self.demand.cache.page_bytes(self.demand.tensor_parallel)

    @property
    def num_pages(self) -> int:
        """Pages that there are, and that the rollout can fill."""
        return self.demand.cache.num_pages(self.kv, self.demand.tensor_parallel)

    @property
    def sequences(self) -> float:
        """The longest sequences whose pages there are at a time in a replica."""
        return self.num_pages / self.demand.cache.pages_of_longest

    @property
    def total(self) -> float:
        """Bytes at the worst moment, with the pages."""
        return self.wanted + self.num_pages * self.demand.cache.page_bytes(self.demand.tensor_parallel)

    @property
    def fits(self) -> bool:
        """Whether a GPU holds it all. A CPU is not asked."""
        return not self.demand.device or self.wanted + self.least_kv <= self.demand.device

    @property
    def has_room(self) -> bool:
        """Whether it fits with as many pages as were asked for, else with enough for decoding to be worth it."""
        d, enough = self.demand, min(ENOUGH, self.demand.cache.max_running)
        return self.fits and (not (d.device and d.decodes) or bool(d.kv) or self.sequences >= enough)

    @property
    def rank(self) -> str:
        """The kind of rank that this is the plan of."""
        d = self.demand
        return "rank" if d.trains and d.decodes else f"rank that only {'trains' if d.trains else 'decodes'}"

    def table(self) -> str:
        """Return the plan as lines of text, in GiB."""
        d = self.demand
        pages = f"KV pages{'' if d.kv else ', from the rest'}: {self.num_pages} of {d.cache.page_size} tokens, "
        lasting = self.lasting | {f"{pages}{self.sequences:.1f} longest sequences": self.total - self.wanted}
        lines = [
            f"planned memory of a {self.rank} in GiB{f', of {d.device / GIB:.1f} that the GPU has' * bool(d.device)}"
        ]
        lines += [f"(rollout.weights = {d.layout}{f': {self.layout}' * (d.layout == 'auto')})"]
        lines += _rows(lasting) + [f"and at the worst moment, {self.worst}"]
        return "\n".join(lines + _rows(self.moments[self.worst] | {"sum": self.total}))


def _rows(lines: Lines) -> list[str]:
    return [f"  {name:70}{size / GIB:9.3f}" for name, size in lines.items() if size]


def plans(d: Demand, train_ranks: int) -> tuple[Plan, ...]:
    """Return the plan of each kind of rank: of all, or of the first `train_ranks` and of those that decode."""
    if not train_ranks:
        return (plan(d),)
    rest = d.num_ranks - train_ranks
    own = [d.communicators + (d.device > 0) * (size > 1) for size in (train_ranks, rest)]  # a group of the pool's ranks
    trains = replace(d, decodes=False, num_ranks=train_ranks, communicators=own[0])
    return plan(trains), plan(replace(d, trains=False, communicators=own[1]))


def plan(d: Demand) -> Plan:
    """Return what a rank holds. Each line has its reason beside it."""
    if d.layout == "auto":
        whole = plan(replace(d, layout="whole"))
        is_short = not whole.fits or whole.wanted > (1 - KV_SHARE) * d.device
        shards = d.device and d.shard > 1 and is_short
        return replace(plan(replace(d, layout="sharded")) if shards else whole, demand=d)
    s, b, rows = d.shape, d.itemsize, d.cache.max_running
    is_copied = d.adapters > 0 or d.shard > 1 or b < 4  # else the weights are their own masters
    state, base = 8 * d.trained, _base(d)  # two moments of AdamW; the start of each merge
    head_only = d.numbers - (0 if s.tied else d.embedding_numbers)
    # With their logits; a filter, log_softmax and exp make fp32 tensors of that size.
    drawing = rows * s.vocab_size * (b + 4 + 8 * d.filters)
    graphs = d.decodes * (d.graphs * GRAPH_LAYER * s.num_layers + drawing * (d.graphs > 0))
    around = (CONTEXT + d.communicators * COMMUNICATOR) * (d.device > 0)
    lasting = {
        "weights of the rollout": d.weights / (d.tensor_parallel if d.layout == "sharded" else 1),
        "packed copies of them": head_only * b * d.packed,
        "weights of the reference": d.weights * d.has_reference * d.trains,
        PARTS: b * d.numbers / d.shard * bool(d.trains and d.adapters and d.shard > 1),
        "weights without adapters": base * (not d.offload),
        "masters": 4 * d.trained * is_copied,
        "gradients": 4 * d.trained,
        "optimizer state": state * (not d.offload),
        "judge": d.judge * d.decodes,
        "teacher": d.teacher * d.trains,
        "tokens and log-probs of decoding rows": 12 * rows * d.cache.longest,
        "CUDA graphs": graphs,
        f"CUDA context, {d.communicators} communicators, other programs": max(around, d.outside),
        "left free": FREE * d.device,
    }
    moments = _training(d) | _updating(d) if d.trains else {}
    moments |= {"while the rollout prefills": _prefill(d)} if d.decodes else {}
    if d.trains != d.decodes:
        moments["as new weights go to the ranks that decode"] = {"pieces of them": 3 * min(BUCKET, d.weights)}
    return Plan(d, lasting, moments, d.layout)


def _base(d: Demand) -> float:
    """Return the bytes of weights as they are without their adapters. A reference on one rank serves as them."""
    return d.trains * d.adapted * d.itemsize / d.shard * (d.shard > 1 or not d.has_reference)


def _of_experts(d: Demand) -> int:
    """Return the bytes of a token for each of its experts, as long as the hidden state; none without a mixture."""
    return max(d.shape.experts_per_token, 1) * d.shape.hidden_size * d.itemsize if d.shape.num_experts else 0


def layer_bytes(d: Demand) -> float:
    """Return what a layer keeps of one token for its backward pass."""
    s, b = d.shape, d.itemsize
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    mixed = 2 * _of_experts(d)  # what each expert reads, and what it makes of it
    if d.compiled:  # two norms and their results; q, k, v, the output; gate and up, silu(gate) * up
        return (4 * s.hidden_size + 2 * heads + 2 * kv + 3 * s.mlp_width) * b + 8 * (heads + kv) * s.qk_norm + mixed
    # Two norms: the input in fp32, that normalised in fp32 for the gradient of their weights, the output.
    norms = 2 * (4 + 4 * (not d.adapters) + b) * s.hidden_size
    # q, k, v, the output. A CPU has k and v for all query heads, and pads the sequences: the packed output is a copy.
    attention = (2 * heads + 2 * kv if d.device else 5 * heads) * b
    qk_norms = 8 * (heads + kv) * s.qk_norm
    return norms + attention + qk_norms + 4 * s.mlp_width * b + mixed  # gate and up, silu(gate), their product


def _training(d: Demand) -> dict[str, Lines]:
    """Return the moments of a micro-batch: as its logits are scored, and in the backward pass of a layer."""
    s, b, T = d.shape, d.itemsize, d.tokens
    layer, chunk, head = layer_bytes(d), min(d.logits_tokens, T), d.embedding_numbers * b * (not d.adapters)
    # Of each layer, and behind the last a norm and the rows of sampled tokens.
    kept = s.num_layers * (s.hidden_size * b if d.recompute else layer) + (8 + 3 * b) * s.hidden_size
    activations = {f"{'inputs' if d.recompute else 'activations'} of all layers, {T} tokens": kept * T}
    # Logits and log-probs, and three of their size for the entropy. Of bf16 and of scaled logits there is a fp32 copy.
    per_logit = (22 if b < 4 else 24 if d.scales else 20) + 6 * d.filters + 5 * d.entropy
    logits = {
        f"logits of {chunk} tokens": per_logit * chunk * s.vocab_size,
        "gradient of the head so far": head * (chunk < T),
    }
    # As the head's gradient is added to: the sum so far, this chunk's part, the new sum.
    summed = {f"gradient of {chunk} logits": b * chunk * s.vocab_size, "gradients of the head": 3 * head}
    backward = {
        "gradient of the head": head * s.tied,  # waits for the embedding's
        "activations of one layer": layer * T * d.recompute,
        # In the MLP: those of gate and up, before and after they are joined, less what is freed on the way.
        "gradients of activations": ((2 * s.mlp_width + 2 * s.hidden_size) * b + 2 * _of_experts(d)) * T,
    }
    return {
        "as the teacher reads": {"two of its layers, activations, logits": d.teaching},
        "as a chunk of logits is scored": activations | logits | _fsdp(d, 0),
        "as a chunk's gradient reaches the head": activations | summed | _fsdp(d, 0),
        "in the backward pass of the last layer": activations | backward | _fsdp(d, 1),
    }


def _fsdp(d: Demand, layers: int) -> Lines:
    """Return the whole weights and gradients that FSDP holds, with none or one of the layers at work."""
    b = d.itemsize
    # A layer's weights and the next one's, its gradients, and the fp32 buffer that the one before is reduced in.
    of_layers = layers * d.matrix_numbers * (2 * b + (b + 4) * (not d.adapters))
    return {"FSDP: embedding, head, layer at work": (d.end_numbers * b + of_layers) * (d.shard > 1)}


def _updating(d: Demand) -> dict[str, Lines]:
    """Return the moments behind the layers: gradients of the embedding, their reduction, the update."""
    b, largest = d.itemsize, 4 * (d.largest_adapted if d.adapters else d.embedding_numbers)
    update = {
        "offloaded optimizer state": 8 * d.trained * d.offload,
        "offloaded weights without adapters": _base(d) * d.offload,
        "largest weight as it is merged": largest / d.shard * bool(d.adapters),
        "largest weight, whole, or a bucket of gradients": max(largest, BUCKET) * (d.num_ranks > 1),
    }
    if d.adapters:
        return {"in the update": update}
    return {
        "as the embedding's gradient is added": {
            "gradients of the embedding": (3 if d.shape.tied else 1) * d.embedding_numbers * b,
        }
        | _fsdp(d, 0),
        "as the embedding's gradient is reduced": {
            "gradients of embedding and head": d.end_numbers * b * (d.shard > 1),
            "the same in fp32, to be reduced": d.end_numbers * 4 * (d.shard > 1),
        }
        | _fsdp(d, 0),
        "in the update": update,
    }


def _prefill(d: Demand) -> Lines:
    """Return what a forward of the rollout holds: a layer's MLP, its keys and values, what drawing takes of logits."""
    s, b = d.shape, d.itemsize
    tokens = max(d.step_tokens, d.cache.max_running)  # of one forward
    gathered = max(d.cache.longest, min(GATHERED_TOKENS, d.cache.longest * d.cache.max_running))
    numbers = 2 * max(s.num_kv_heads // d.tensor_parallel, 1) * s.head_dim  # keys and values of a token in a layer
    return {
        f"activations of {tokens} tokens": (3 * (s.mlp_width + s.hidden_size) * b + 3 * _of_experts(d)) * tokens,
        f"a layer's keys and values of {gathered} tokens": numbers * b * gathered,
        f"logits of {d.cache.max_running} rows": 20 * d.cache.max_running * s.vocab_size,
    }


Changes = dict[str, object]  # values by setting


def remedy(
    options: Mapping[str, Sequence[object]], planned: Callable[[Changes], Sequence[Plan]]
) -> tuple[Changes, Plan] | None:
    """Return the fewest changes of settings that give room for enough sequences, and the plan of ranks that decode.

    If none do, the changes that fit: the fewest, and of those the most pages; None if none fit. `options`: values to
    try, by setting, the cheapest setting first. `planned` returns the plans with changes, none if they are refused.
    """
    fitting: list[tuple[Changes, Plan]] = []
    for count in range(1, len(options) + 1):
        for keys in combinations(options, count):
            for values in product(*(options[key] for key in keys)):
                changes = dict(zip(keys, values, strict=True))
                if (made := planned(changes)) and all(each.has_room for each in made):
                    return changes, made[-1]
                if made and all(each.fits for each in made):
                    fitting.append((changes, made[-1]))
    return min(fitting, key=lambda found: (len(found[0]), -found[1].sequences), default=None)
