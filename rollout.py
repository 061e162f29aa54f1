"""The generation engine: a paged KV cache, continuous batching, sampling, abort, preemption by recomputation.

Decode state lives in device tensors whose first `n` rows are the running sequences; the host mirrors only lengths
and page tables. Per decoded token the host reads one thing back: which rows have finished.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attention import PackedAttention, decode_by_gather, decode_by_page
from config import ConfigError, option
from core import Prompt, Sample
from model import Model, ModelShape
from sampling import SamplingConfig, sample, sample_key, uniforms


@dataclass(frozen=True)
class RolloutConfig:
    max_prompt_tokens: int = option(512, "longest prompt allowed, in tokens", min=1)
    max_response_tokens: int = option(1024, "length limit of a response, in tokens", min=1)
    max_running: int = option(256, "sequences that decode together on one rank, at most", min=1)
    prefill_tokens: int = option(8192, "tokens of one prefill forward, at most (one longer sequence goes alone)", min=1)
    page_size: int = option(32, "tokens in one KV page", min=1)
    kv_gib: float = option(
        0.25, "memory of the KV page pool of one rank, in GiB; 0: half of the free GPU memory", min=0.0
    )


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample inside an engine."""

    prompt_index: int
    response_index: int
    epoch: int
    prompt_ids: tuple[int, ...]
    key: int  # sampling stream, from `sample_key`
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)  # generated so far; current only while not running
    logprobs: list[float] = field(default_factory=list)
    row: int = -1  # row of the decode state while running
    admitted: int = -1  # order of admission: the newest is preempted first
    pages: list[int] = field(default_factory=list)

    @property
    def id(self) -> tuple[int, int, int]:
        return (self.epoch, self.prompt_index, self.response_index)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


def sequences_for(epoch: int, prompt: Prompt, num_responses: int, seed: int, max_new_tokens: int) -> list[Sequence]:
    """Return the sequences of one group. Their sampling streams depend on nothing but their names and `seed`."""
    return [
        Sequence(prompt.index, r, epoch, prompt.token_ids, sample_key(seed, epoch, prompt.index, r), max_new_tokens)
        for r in range(num_responses)
    ]


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made; the caller takes differences."""

    decode_steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0


def kv_page_bytes(shape: ModelShape, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of `page_size` tokens in every layer."""
    return 2 * shape.num_layers * shape.num_kv_heads * page_size * shape.head_dim * dtype.itemsize


def num_pages_for(config: RolloutConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many pages the memory budget holds. Raises ConfigError when one full sequence does not fit."""
    budget = config.kv_gib * 2**30
    if budget == 0:
        if device.type != "cuda":
            raise ConfigError("rollout.kv_gib = 0 needs a GPU; on CPU state the memory, such as rollout.kv_gib = 0.25")
        budget = torch.cuda.mem_get_info(device)[0] / 2
    page_bytes = kv_page_bytes(shape, config.page_size, dtype)
    num_pages = int(budget // page_bytes)
    longest = config.max_prompt_tokens + config.max_response_tokens
    needed = -(-longest // config.page_size)
    if num_pages < needed:
        raise ConfigError(
            f"rollout.kv_gib = {config.kv_gib} holds {num_pages} pages of {page_bytes} bytes, but one sequence of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens needs {needed}; set "
            f"rollout.kv_gib to at least {needed * page_bytes / 2**30:.4g}, or lower rollout.max_response_tokens"
        )
    most = config.max_running * needed  # more could never be used
    return min(num_pages, most)


def compact(freed: list[int], num_used: int) -> list[tuple[int, int]]:
    """Return the moves (from, to) that close the holes `freed` in 0 .. num_used - 1. No move feeds another."""
    new_used, gone = num_used - len(freed), set(freed)
    holes = sorted(i for i in freed if i < new_used)
    tail = [i for i in range(new_used, num_used) if i not in gone]
    return list(zip(tail, holes, strict=True))


class Engine:
    """Generates samples for one model replica. `add`, then `step` until `is_idle`; `abort` whenever.

    Pages in use are always 0 .. P-1 (the CPU attention path needs that), so freeing moves the last pages into the
    holes; running rows are kept 0 .. n-1 in the same way.
    """

    def __init__(self, model: Model, config: RolloutConfig, sampling: SamplingConfig, eos_ids: Iterable[int]):
        self.model, self.config, self.sampling = model, config, sampling
        self.version = 0  # of the weights, stamped on finished samples
        self.stats = EngineStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        shape, weight = model.shape, model.embed.weight
        self.device = weight.device
        self.num_pages = num_pages_for(config, shape, weight.dtype, self.device)
        self.pages_used = 0
        self.admissions = 0
        rows, page = config.max_running, config.page_size
        per_sequence = -(-(config.max_prompt_tokens + config.max_response_tokens) // page)
        # One tensor, so that a page moves with one copy: [layers, k|v, pages, K, page, D]
        pool_shape = (shape.num_layers, 2, self.num_pages, shape.num_kv_heads, page, shape.head_dim)
        self.pool = torch.zeros(pool_shape, dtype=weight.dtype, device=self.device)

        def state(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.last_token = state(rows)  # sampled, not yet in the cache
        self.length = state(rows)  # tokens in the cache
        self.count = state(rows)  # response tokens so far
        self.limit = state(rows)
        self.key = state(rows)
        self.tokens = state(rows, config.max_response_tokens)
        self.logprobs = state(rows, config.max_response_tokens, dtype=torch.float32)
        self.row_state = (self.last_token, self.length, self.count, self.limit, self.key, self.tokens, self.logprobs)
        self.eos_ids = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=self.device)
        # Host mirrors. On CPU the page arrays are also read directly as tensors.
        self.host_length = np.zeros(rows, np.int64)
        self.host_pages = np.zeros(rows, np.int64)
        self.table = np.zeros((rows, per_sequence), np.int64)
        self.page_row = np.zeros(self.num_pages, np.int64)
        self.page_start = np.zeros(self.num_pages, np.int64)  # position of a page's first token in its sequence
        filled = torch.arange(page)[None] < torch.arange(page + 1)[:, None]  # [page + 1, page]
        self.bias = torch.zeros(page + 1, page).masked_fill(~filled, -torch.inf).to(weight.dtype)

    # ---- interface -------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. One with `token_ids` continues where it was. Raises ValueError when it cannot fit."""
        longest = len(sequence.prompt_ids) + sequence.max_new_tokens
        if longest > self.table.shape[1] * self.config.page_size or longest > self.model.shape.max_positions:
            raise ValueError(f"sequence {sequence.id} may grow to {longest} tokens, over the engine's limit")
        self.waiting.append(sequence)

    def load_weights(self, model: Model, version: int) -> None:
        """Decode with `model` from now on. The trainer's own module: nothing is copied. Wants an idle engine."""
        assert self.is_idle, "new weights while sequences run would mix two policies in one sample"
        self.model, self.version = model, version

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admit what fits, decode one token for every running sequence, return the samples that finished."""
        finished = self._admit()
        if self.running:
            finished += self._decode()
        return finished

    def abort(self, ids: Iterable[tuple[int, int, int]]) -> int:
        """Drop sequences by id, free their pages at once and return how many response tokens were thrown away."""
        ids = set(ids)
        gone = [s for s in self.running if s.id in ids]
        wasted = int(self.count[[s.row for s in gone]].sum()) if gone else 0
        wasted += sum(len(s.token_ids) for s in self.waiting if s.id in ids)
        self._remove(gone)
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        return wasted

    # ---- admission and prefill -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _admit(self) -> list[Sample]:
        """Prefill waiting sequences while rows, pages and the token budget last; they sample their first token."""
        page, reserve = self.config.page_size, self.num_pages // 100
        finished: list[Sample] = []
        while self.waiting:
            admitted: list[Sequence] = []
            contexts: dict[tuple[int, ...], int] = {}  # equal contexts (a group's prompt) are computed once
            budget = self.config.prefill_tokens
            while self.waiting and len(self.running) < self.config.max_running:
                sequence = self.waiting[0]
                context = sequence.prompt_ids + tuple(sequence.token_ids)
                needed = -(-len(context) // page)
                # The reserve keeps a newcomer from being preempted by the next page that an older one needs.
                if self.pages_used + needed > self.num_pages - (reserve if self.running else 0):
                    break
                if context not in contexts:
                    if len(context) > budget and contexts:
                        break
                    budget -= len(context)
                    contexts[context] = len(contexts)
                self.waiting.popleft()
                self._load(sequence, needed)
                admitted.append(sequence)
            if not admitted:
                break
            finished += self._prefill(admitted, contexts)
        return finished

    def _load(self, sequence: Sequence, num_pages: int) -> None:
        """Give a sequence its row and pages. Its device state is written by `_prefill`."""
        sequence.row = row = len(self.running)
        self.running.append(sequence)
        sequence.admitted = self.admissions
        self.admissions += 1
        self.host_pages[row] = 0
        self.host_length[row] = sequence.num_tokens
        for _ in range(num_pages):
            self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        row, page = sequence.row, self.pages_used
        self.table[row, self.host_pages[row]] = page
        self.page_row[page] = row
        self.page_start[page] = self.host_pages[row] * self.config.page_size
        sequence.pages.append(page)
        self.host_pages[row] += 1
        self.pages_used += 1
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages_used)

    def _prefill(self, admitted: list[Sequence], contexts: dict[tuple[int, ...], int]) -> list[Sample]:
        """Compute each distinct context once and write its KV to the pages of every sequence that has it."""
        page, device = self.config.page_size, self.device
        lengths = [len(context) for context in contexts]
        starts = np.cumsum([0, *lengths])
        which = [contexts[s.prompt_ids + tuple(s.token_ids)] for s in admitted]
        rows_of = [np.arange(starts[c], starts[c + 1]) for c in which]
        slots = [np.arange(lengths[c]) for c in which]
        pages = [self.table[s.row, slot // page] for s, slot in zip(admitted, slots, strict=True)]
        source, write_page, offset = (
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (rows_of, pages, [slot % page for slot in slots])
        )
        token_ids = torch.tensor([t for context in contexts for t in context], device=device)
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
        packed = PackedAttention(lengths, device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.pool[layer, 0][write_page, :, offset] = k[source]
            self.pool[layer, 1][write_page, :, offset] = v[source]
            return packed(layer, q, k, v)

        hidden = self.model(token_ids, positions, attend)
        last = torch.from_numpy(starts[1:] - 1).to(device)
        logits = self.model.logits(hidden[last])[torch.tensor(which, device=device)]
        self.stats.prefilled_tokens += len(token_ids)

        first, end = admitted[0].row, admitted[-1].row + 1  # new rows follow the old ones
        rows = slice(first, end)
        for tensor, values in (
            (self.length, [lengths[c] for c in which]),
            (self.count, [len(s.token_ids) for s in admitted]),
            (self.limit, [s.max_new_tokens for s in admitted]),
            (self.key, [s.key for s in admitted]),
        ):
            tensor[rows] = torch.tensor(values, device=device)
        for s in admitted:
            if s.token_ids:
                self.tokens[s.row, : len(s.token_ids)] = torch.tensor(s.token_ids, device=device)
                self.logprobs[s.row, : len(s.token_ids)] = torch.tensor(s.logprobs, device=device)
        return self._sample(logits, rows)

    # ---- decode ----------------------------------------------------------------------------------------------

    def _decode(self) -> list[Sample]:
        self._make_room()
        n, page = len(self.running), self.config.page_size
        position = self.length[:n]
        if self.device.type == "cpu":
            used = self.pages_used
            owner = torch.from_numpy(self.page_row[:used])
            start = torch.from_numpy(self.page_start[:used])
            table = torch.from_numpy(self.table[:n])
            filled = (position[owner] + 1 - start).clamp_(max=page)
            bias = self.bias[filled][:, None, None]  # [P, 1, 1, page]
        else:
            table = torch.from_numpy(self.table[:n, : int(self.host_pages[:n].max())]).to(
                self.device, non_blocking=True
            )
        write_page = table.gather(1, (position // page)[:, None])[:, 0]
        offset = position % page

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_pool, v_pool = self.pool[layer, 0], self.pool[layer, 1]
            k_pool[write_page, :, offset] = k
            v_pool[write_page, :, offset] = v
            if self.device.type == "cpu":
                return decode_by_page(q, k_pool[:used], v_pool[:used], owner, bias)
            return decode_by_gather(q, k_pool, v_pool, table, position + 1)

        hidden = self.model(self.last_token[:n], position, attend)
        self.length[:n] += 1
        self.host_length[:n] += 1
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += n
        return self._sample(self.model.logits(hidden), slice(0, n))

    def _make_room(self) -> None:
        """Give a page to every sequence that has filled its last one; when none is left, preempt the newest."""
        n, page = len(self.running), self.config.page_size
        for sequence in [
            self.running[row] for row in np.flatnonzero(self.host_length[:n] == self.host_pages[:n] * page)
        ]:
            while self.pages_used == self.num_pages and sequence.row >= 0:
                self._preempt(max(self.running, key=lambda s: s.admitted))
            if sequence.row >= 0:
                self._grow(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's pages; its tokens are kept and its KV is recomputed when it is admitted again."""
        count = int(self.count[sequence.row])
        sequence.token_ids = self.tokens[sequence.row, :count].tolist()
        sequence.logprobs = self.logprobs[sequence.row, :count].tolist()
        self._remove([sequence])
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    # ---- shared ----------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, rows: slice) -> list[Sample]:
        """Draw the next token of `rows`, record it, and take out the sequences that it ends."""
        count = self.count[rows]
        token, logprob = sample(logits, uniforms(self.key[rows], count), self.sampling)
        self.last_token[rows] = token
        self.tokens[rows].scatter_(1, count[:, None], token[:, None])
        self.logprobs[rows].scatter_(1, count[:, None], logprob[:, None])
        count += 1
        stopped = torch.isin(token, self.eos_ids)
        ended = (stopped | (count >= self.limit[rows])).nonzero()[:, 0].tolist()  # the step's only read-back
        finished = []
        for i in ended:
            sequence = self.running[rows.start + i]
            length = int(count[i])
            finished.append(
                Sample(
                    prompt_index=sequence.prompt_index,
                    response_index=sequence.response_index,
                    epoch=sequence.epoch,
                    token_ids=tuple(self.tokens[sequence.row, :length].tolist()),
                    logprobs=tuple(self.logprobs[sequence.row, :length].tolist()),
                    finish_reason="stop" if bool(stopped[i]) else "length",
                    weights_version=self.version,
                )
            )
        self._remove([self.running[rows.start + i] for i in ended])
        return finished

    def _remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out and close the holes they leave among the pages and among the rows."""
        if not sequences:
            return
        pages = [page for s in sequences for page in s.pages]
        page_moves = compact(pages, self.pages_used)
        self.pages_used -= len(pages)
        row_moves = compact([s.row for s in sequences], len(self.running))
        if page_moves:
            source, target = (torch.tensor(x, device=self.device) for x in zip(*page_moves, strict=True))
            self.pool[:, :, target] = self.pool[:, :, source]
        for source, target in page_moves:
            row, start = self.page_row[source], self.page_start[source]
            self.running[row].pages[start // self.config.page_size] = target
            self.table[row, start // self.config.page_size] = target
            self.page_row[target], self.page_start[target] = row, start
        if row_moves:
            source, target = (torch.tensor(x, device=self.device) for x in zip(*row_moves, strict=True))
            for tensor in self.row_state:
                tensor[target] = tensor[source]
        for s in sequences:
            s.row, s.pages = -1, []
        for source, target in row_moves:
            moved = self.running[source]
            moved.row = target
            self.running[target] = moved
            for array in (self.host_length, self.host_pages, self.table):
                array[target] = array[source]
            self.page_row[moved.pages] = target
        del self.running[len(self.running) - len(sequences) :]
