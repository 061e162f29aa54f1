"""A sample on its way through an engine, and a context on its way into the cache. Plain values, no tensors."""

from dataclasses import dataclass, field

from core import Prompt
from sampling import sample_key


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample inside an engine."""

    prompt_index: int
    response_index: int
    epoch: int
    prompt_ids: tuple[int, ...]
    key: int  # sampling stream, from `sample_key`
    max_new_tokens: int
    ignore_eos: bool = False  # run to `max_new_tokens`: lengths given by a trace
    stop: tuple[str, ...] = ()  # texts that end the response, besides the end token
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


@dataclass(slots=True, eq=False)
class Prefill:
    """A context on its way into the cache: the leader's, for all who have the same."""

    leader: Sequence
    context: tuple[int, ...]
    cached: int = 0
    followers: list[Sequence] = field(default_factory=list)
