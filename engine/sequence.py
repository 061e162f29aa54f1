"""A sample on its way through an engine, and a context on its way into the cache. Plain values, no tensors."""

from array import array
from collections import abc
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from core import Sample, SampleId, Span, turns_of, with_span


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample inside an engine."""

    prompt_index: int
    response_index: int
    epoch: int
    prompt_ids: tuple[int, ...]
    key: int  # of its random numbers, from `sampling.sample_key`
    max_new_tokens: int
    ignore_eos: bool = False  # run to `max_new_tokens`: lengths given by a trace
    stop: tuple[str, ...] = ()  # texts that end the response, besides the end token
    token_ids: abc.Sequence[int] = ()  # generated or given so far; current only while not running
    logprobs: abc.Sequence[float] = ()  # 0 for given tokens
    spans: tuple[Span, ...] = ()  # of what was generated before the newest admission, or change of the weights
    max_turn_tokens: int = 0  # sampled in one turn; 0: `max_new_tokens` is the only limit
    has_turns: bool = False  # when a turn ends, its pages are kept for the next
    turn_start: int = field(init=False)  # place of the newest turn's first token in the response
    has_old_kv: bool = field(init=False, default=False)  # of older weights: nobody may take its pages over
    is_taken: bool = False  # an engine has it
    row: int = -1  # row of the decode state while running
    admitted: int = -1  # order of admission: the newest is preempted first
    pages: list[int] = field(init=False, default_factory=list)  # a copy has none

    def __post_init__(self) -> None:
        is_inside = self.spans and self.spans[-1].end == len(self.token_ids)  # of a turn
        self.turn_start = turns_of(self.spans)[-1].start if is_inside else len(self.token_ids)

    @property
    def id(self) -> SampleId:
        return SampleId(self.epoch, self.prompt_index, self.response_index)

    @property
    def limit(self) -> int:
        """Response tokens at which the newest turn ends."""
        return min(self.max_new_tokens, self.turn_start + (self.max_turn_tokens or self.max_new_tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def is_resumed(self) -> bool:
        return bool(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens of the context that were in a cache: those before the last sampled one."""
        return len(self.prompt_ids) + self.spans[-1].end - 1 if self.spans else 0

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response, but for what a running sequence drew since it was admitted."""
        return self.prompt_ids + tuple(self.token_ids)

    def spans_to(self, count: int, version: int) -> tuple[Span, ...]:
        """Return the spans of the first `count` response tokens, the newest of which these weights have sampled."""
        return with_span(self.spans, count, version, self.turn_start)

    def check(self, max_prompt_tokens: int, max_response_tokens: int, max_positions: int, vocab_size: int) -> None:
        """Raise ValueError when an engine with these limits cannot take the sequence."""
        count, prompt = len(self.token_ids), len(self.prompt_ids)
        wrong = ""
        if self.is_taken:
            wrong = "is in an engine; `export` it there first"
        elif not 0 < prompt <= max_prompt_tokens:
            wrong = f"has {prompt} prompt tokens; it must have 1 to rollout.max_prompt_tokens = {max_prompt_tokens}"
        elif not count < self.max_new_tokens <= max_response_tokens:
            wrong = (
                f"has max_new_tokens = {self.max_new_tokens}; it must be over the {count} tokens it has and at most "
                f"rollout.max_response_tokens = {max_response_tokens}"
            )
        elif prompt + self.max_new_tokens > max_positions:
            wrong = f"may grow to {prompt + self.max_new_tokens} tokens; the model's context has {max_positions}"
        elif not all(isinstance(i, int) and 0 <= i < vocab_size for i in (*self.prompt_ids, *self.token_ids)):
            wrong = f"holds something else than the token ids 0 to {vocab_size - 1}"
        elif count != len(self.logprobs):
            wrong = f"has {count} tokens, but {len(self.logprobs)} log-probs"
        elif isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            wrong = f'has stop = {self.stop!r}; it must be a tuple of texts, such as ("END",)'
        if wrong:
            raise ValueError(f"sequence {self.id} {wrong}")


def continued(sequence: Sequence, turn: Sample | Sequence, reply: abc.Sequence[int]) -> Sequence:
    """Return `sequence` as it goes on after a turn: it has the turn's transcript, and then the tokens of the reply.

    `turn`: the sample that ended with the turn; for a reply before the first turn `sequence` itself. A reply has at
    least one token: without one the turn would go on.
    """
    assert reply, f"sequence {sequence.id} gets an empty reply"
    tokens, logprobs = array("i", [*turn.token_ids, *reply]), array("f", [*turn.logprobs, *[0.0] * len(reply)])
    return replace(sequence, token_ids=tokens, logprobs=logprobs, spans=turn.spans)


@dataclass(slots=True, eq=False)
class Parked:
    """The pages of a sequence between two turns, for all its tokens but the last."""

    prompt_ids: tuple[int, ...]
    token_ids: array  # of the response
    pages: list[int] = field(default_factory=list)
    row: int = -1
    kv: Any = None  # a tensor: keys and values of pages that do not stay where they are (engine/cpu.py)
    experts: Any = None  # of a mixture, a tensor: the choices in those pages

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def begins(self, sequence: Sequence) -> bool:
        """Whether the sequence has these tokens, and perhaps more."""
        begin = array("i", sequence.token_ids[: len(self.token_ids)])
        return begin == self.token_ids and sequence.prompt_ids == self.prompt_ids


@dataclass(slots=True, eq=False)
class Prefill:
    """A context on its way into the cache: the leader's, for all who have the same."""

    leader: Sequence
    context: tuple[int, ...]
    cached: int = 0
    followers: list[Sequence] = field(default_factory=list)


class Chunk(NamedTuple):
    """The tokens `start` .. `end` of a context, to be computed in one step."""

    prefill: Prefill
    start: int
    end: int


@dataclass(slots=True)
class EngineStats:
    """What happened since the newest `take`. Of a replica only the first rank counts, but for its copied bytes."""

    decode_steps: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0  # computed behind the newest token of a row (engine/drafts.py)
    accepted_tokens: int = 0  # of these, tokens that were drawn
    prefilled_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    peak_parked_pages: int = 0  # of turns before, kept for the next
    resumed_tokens: int = 0  # of turns before, that were not computed again because their pages were kept
    recomputed_tokens: int = 0  # of resumed contexts, that were computed again: pages were not kept, or preempted
    shared_tokens: int = 0  # prompt tokens that were not computed, because another sequence had them
    regroup_bytes: int = 0  # weights copied because the tensor-parallel size changed

    def take(self) -> "EngineStats":
        """Return what has been counted, and count from zero."""
        taken = replace(self)
        for counter in fields(self):
            setattr(self, counter.name, 0)
        return taken
