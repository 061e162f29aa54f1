"""The data types that cross rooms. Frozen values, no logic beyond properties."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

if TYPE_CHECKING:
    from tokenizers import AddedToken


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: str | None
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, "AddedToken"]: ...

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: object,
    ) -> str: ...


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
    windows: tuple[int, ...] = ()  # of each layer: newest tokens that a token attends to, itself included; 0: all
    num_experts: int = 0  # of each layer, `intermediate_size` wide; 0: one MLP for all tokens
    experts_per_token: int = 0
    normalise_experts: bool = False  # the weights of a token's experts have the sum 1
    stored_joined: bool = False  # a folder has q|k|v as one weight, and gate|up

    @property
    def mlp_blocks(self) -> int:
        """Blocks in which gate and up rows alternate: one for each of up to 8 tensor-parallel ranks.

        An expert is on one rank.
        """
        return 1 if self.num_experts else math.gcd(self.intermediate_size, 8)

    @property
    def mlp_width(self) -> int:
        """Rows of gate, or of up, that a token is multiplied by."""
        return self.intermediate_size * max(self.experts_per_token, 1)

    @property
    def mlp_numbers(self) -> int:
        """Numbers in the MLP of a layer, or in its experts and their router, but for biases."""
        return self.hidden_size * (3 * self.intermediate_size * max(self.num_experts, 1) + self.num_experts)

    @property
    def choice_bytes(self) -> int:
        """Bytes of the experts that a token takes in all layers."""
        return self.num_layers * self.experts_per_token

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a data set, ready for the engine."""

    index: int  # place in the training or held-out list: the identity of a prompt everywhere
    token_ids: tuple[int, ...]
    text: str  # what the model reads, decoded
    answer: str
    task: str  # name of the grader
    extra: dict = field(default_factory=dict)  # all fields of the data row, for graders
    where: str = ""  # file and line, for messages
    env: str = ""  # name of the environment; none: one turn
    source: str = ""  # the built-in task or file that it comes from


class VisitId(NamedTuple):
    """The name of a visit. A plain tuple with names: it equals, sorts, prints and is stored as (epoch, prompt)."""

    epoch: int
    prompt: int  # its index

    def sample(self, response: int) -> "SampleId":
        return SampleId(*self, response)

    def __repr__(self) -> str:  # messages and random seeds contain it
        return repr(tuple(self))


class SampleId(NamedTuple):
    """The name of a sample: the visit, and which response to it. As plain a tuple as `VisitId`."""

    epoch: int
    prompt: int
    response: int

    @property
    def visit(self) -> VisitId:
        return VisitId(self.epoch, self.prompt)

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Visit:
    """A prompt in an epoch: what a round launches and the run trains once."""

    epoch: int
    prompt: Prompt
    launch: int = 0  # how often it was launched before, and given up for its age: its responses are drawn anew

    @property
    def id(self) -> VisitId:
        return VisitId(self.epoch, self.prompt.index)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a response that one version of the weights sampled: tokens `start` to `end` - 1 of it."""

    start: int
    end: int
    version: int  # the optimizer step whose weights sampled it

    def __len__(self) -> int:
        return self.end - self.start


def with_span(spans: tuple[Span, ...], end: int, version: int, given: int = 0) -> tuple[Span, ...]:
    """Return spans that reach to token `end`: this version has sampled all that they lack.

    But for given tokens: the tokens from the last span to token `given`.
    """
    start = max(spans[-1].end if spans else 0, given)
    if start == end:
        return spans
    if spans and (spans[-1].end, spans[-1].version) == (start, version):
        return *spans[:-1], Span(spans[-1].start, end, version)
    return *spans, Span(start, end, version)


def turns_of(spans: Sequence[Span]) -> list[range]:
    """Return the places of each turn's tokens: spans that touch are one turn, under several versions."""
    turns: list[range] = []
    for span in spans:
        touches = turns and turns[-1].stop == span.start
        start = turns.pop().start if touches else span.start
        turns.append(range(start, span.end))
    return turns


@dataclass(frozen=True, slots=True)
class Elsewhere(Sequence):
    """Stands for a sample's tokens, or for their log-probs, on other ranks than the one that has them."""

    length: int
    rank: int  # that has them; `parallel.bring_tokens` asks it

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: object) -> NoReturn:
        raise AssertionError(f"these tokens are on rank {self.rank}")


#: stop: an end token, a stop text, or the environment; else the limit that was reached: length (of all tokens), cut (of
#: one turn's), turns.
FINISH_REASONS = ("stop", "length", "cut", "turns")


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response to a prompt. Never overwritten: a reward or an advantage makes a new object.

    Engines pack tokens as array("i") and log-probs as array("f"): 8 bytes a token, where tuples take 72.
    """

    prompt_index: int
    response_index: int  # 0 .. num_responses - 1 within the prompt
    epoch: int  # of the prompt's visit
    token_ids: Sequence[int]  # response only, the end token included when there is one
    logprobs: Sequence[float]  # of the distribution that was sampled, one per response token; 0 outside the spans
    finish_reason: str  # one of `FINISH_REASONS`
    spans: tuple[Span, ...]  # the tokens that were sampled, in order; the others were given, and are not trained
    #: Of a mixture, the experts that each token of prompt and response took, but the last: [tokens, layers, k] uint8.
    experts: Sequence[int] = ()  # bytes, or none: not recorded

    @property
    def id(self) -> SampleId:
        return SampleId(self.epoch, self.prompt_index, self.response_index)

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.spans))

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason != "stop"


@dataclass(frozen=True, slots=True)
class Reward:
    """The result of a grader. `error`: why a sample got 0 without a verdict."""

    value: float
    seconds: float = 0.0
    error: str = ""
    cases: tuple[tuple[float, bool, bool], ...] = ()  # test cases that ran: seconds, passed, timed out
    parts: dict[str, float] = field(default_factory=dict)  # of the value, before weights
    turns: tuple[float, ...] = ()  # of the value, earned in each turn, by the grader env; for `loss.credit` = turn


class Reply(NamedTuple):
    """The answer of an environment to a turn: the text that the model reads next, and the turn's reward."""

    text: str
    reward: float = 0.0


Turns = Generator[str | Reply, str, float | None]  # yields texts, is sent the text of each turn, returns a reward
Environment = Callable[[dict, int], Turns]  # of the data row and a seed


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt's samples and their rewards: the unit that is graded, normalised and trained."""

    prompt: Prompt
    epoch: int
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]

    @property
    def visit(self) -> VisitId:
        return VisitId(self.epoch, self.prompt.index)


@dataclass(frozen=True, slots=True)
class Example:
    """One response to learn from: the tokens in its spans. The others are context, like the prompt."""

    id: SampleId
    prompt_ids: tuple[int, ...]
    token_ids: Sequence[int]
    spans: tuple[Span, ...]
    logprobs: Sequence[float]  # of `token_ids`, under the distribution they were sampled from
    advantage: float
    old_logprobs: Sequence[float] | None = None  # of the sampled tokens, recomputed by the trainer if asked to
    turn_advantages: tuple[float, ...] = ()  # of each turn, in place of `advantage`
    experts: Sequence[int] = ()  # as of its sample
    #: Of a teacher: log-probs of the sampled tokens, or of the k likeliest in the place of each, and the ids of these.
    teacher_logprobs: Sequence[float] = ()
    teacher_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.spans))

    @property
    def span_advantages(self) -> list[float]:
        if not self.turn_advantages:
            return [self.advantage] * len(self.spans)
        turns = zip(turns_of(self.spans), self.turn_advantages, strict=True)
        return [advantage for turn, advantage in turns for span in self.spans if span.start in turn]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Which prompts a round launches and how much of it is kept. (RollPacker, section 3)"""

    kind: str  # "long": no speculation, every response is awaited; "short": a race; "async": of policies/flow.py
    prompts: tuple[Visit, ...]  # in launch order
    num_responses: int  # launched per prompt
    keep_prompts: int
    keep_responses: int  # per kept prompt, the same for all: rewards are one matrix
    expected: tuple[float, ...] = ()  # tokens of one response, by prompt; empty: nothing is known
    audit: bool = False  # nothing is aborted: for measuring what a race censors


@dataclass(frozen=True, slots=True)
class Finished:
    """A response has ended. All ranks put these events into the same order: (iteration, id)."""

    iteration: int  # engine steps since the round began
    id: SampleId
    num_tokens: int  # of the whole transcript, given tokens included


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank does at the end of a window."""

    abort: tuple[SampleId, ...] = ()
    launch: tuple[Visit, ...] = ()  # as in a plan, with its `num_responses`
    grade: tuple[SampleId, ...] = ()  # whose rewards the next window's events bring along
    done: bool = False


@dataclass(frozen=True, slots=True)
class RoundStats:
    """The numbers of a round, for the records."""

    kind: str
    audit: bool
    prompts: int  # launched, replacements included
    responses: int  # launched
    aborted: int  # responses that were stopped
    requeued: int  # prompts that went to the long-prompt queue
    queue: int  # prompts in it afterwards
    oldest: int  # rounds that the first of them has waited
    wasted_tokens: int  # decoded, not trained
    wasted_tokens_total: int  # of the whole run
    longest: int  # tokens of the longest trained response
    zero_variance: int  # prompts that dynamic sampling replaced
    padded: int  # of those, trained because max_draws was reached
