"""Drafts: tokens that may follow, for an engine to verify several in a step. Pure, no torch.

A token is a function of the weights, its context, its sample's key and its place. So whatever was drawn before for the
same sample is likely to be drawn again, and a draft that is verified changes no token (engine/drafts.py): a source
only has to be right often and cheap. All sources ask one question: where have the last tokens of this response stood
before, in a corpus of theirs, and what followed there? The more tokens agree before a draft, the surer it is; so rates
of acceptance are known by source and by the length of the agreement.

How many tokens a row drafts is chosen to have the most tokens a second (`choose`), from those rates and from measured
seconds of steps. The rates come from drafts that were verified, and from trials that cost no forward: a guess is noted,
and some steps later compared with what was drawn without it. So a source that gets better is found again.
"""

from array import array
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from config import option
from core import SampleId
from engine.sequence import Sequence as EngineSequence
from policies.step_times import fit

GRAM = 2  # tokens, at least, that agree before a draft
LONGEST = 64  # agreeing tokens that are counted; the first draft of an old text counts as that sure
BINS = np.array([0, GRAM, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, LONGEST])  # agreements that have a rate together
NEWEST = 512.0  # tokens that a rate remembers
PRIOR = 8.0  # tokens that a rate is worth before the first
TRIAL_STEPS, TRIAL_ROWS = 128, 8  # steps between two trials; rows that take part
REST_STEPS, REST_ROWS = 256, 8  # steps, at most, in which a source that was asked in vain rests; for each row,
REST_SECONDS = 1e-3  # and less where steps take longer than this: then to ask costs little
OLD_STEPS = 4096  # after which the seconds of a kind of step are forgotten: another try will measure them
FIRST_DRAFTS = 0.2  # of a step without drafts costs that it has some, before this was measured
REFIT_STEPS, SEEN = 64, 3  # steps between two fits; steps of a kind before it counts there
FEWEST = 3  # kinds of steps without drafts before there is a fit
PATIENCE = 16  # steps of a kind without drafts that could not be measured: then there may be drafts
PLAIN_STEPS = 8  # of so many steps without drafts of a known kind one counts: they are many
MANY = 32  # tokens that are noted faster all at once than one by one
TOKEN_BITS = 21  # of a token in the key of a gram; a larger one only shares its key with others
KEY_MASK = (1 << TOKEN_BITS * GRAM) - 1
MIXER = 0x9E3779B97F4A7C15  # spreads keys over places

MOST = 256  # tokens that a row drafts in a step, whatever a user wants

LAST_EPOCH = -2  # in the names of texts that were trained: those of a newer epoch take their places

Tokens = array  # of "i"


# ---- texts and agreements ----------------------------------------------------------------------------------------


class Row:
    """A response under way: its tokens so far, and the agreement that each source has found for them."""

    __slots__ = ("sample", "text", "key", "corpora", "matches", "drafted")

    def __init__(self, sample: SampleId, sources: Sequence["Source"]):
        self.sample, self.text, self.key = sample, array("i"), 0
        self.corpora = [source.corpus(sample) for source in sources]
        self.matches: list[Match | None] = [source.start(sample) for source in sources]
        self.drafted = (0, 0)  # source and length of the agreement of its newest draft


class Match:
    """The last `length` tokens of a row's first `seen` agree with those before `place` in another text."""

    __slots__ = ("text", "place", "seen", "length")

    def __init__(self, text: Tokens, place: int, seen: int, length: int):
        self.text, self.place, self.seen, self.length = text, place, seen, length


class Grams:
    """The place where each run of GRAM tokens of a corpus stood last, in a table of a fixed size: newer ones win."""

    def __init__(self, bits: int = 18):
        self.places, self.mask = array("q", bytes(8 << bits)), (1 << bits) - 1
        self.table = np.frombuffer(self.places, np.int64)  # the same memory
        self.texts: dict[int, Tokens] = {}
        self.numbers: dict[int, int] = {}  # of texts, by identity
        self.count = 0

    def forget(self) -> None:
        """Forget all texts; places of texts that are gone are found no more."""
        self.texts, self.numbers = {}, {}

    def slot(self, corpus: int, key: int) -> int:
        return ((key * MIXER >> 31) ^ corpus) & self.mask

    def note(self, corpora: Collection[int], text: Tokens, start: int, key: int) -> int:
        """Note the tokens of a text from `start` on, before which the last have this key; return the key at its end."""
        number = self.numbers.get(id(text))
        if number is None:
            self.count += 1
            number = self.numbers[id(text)] = self.count
            self.texts[number] = text
        base, places, mask = number << 32, self.places, self.mask
        start = start if corpora else max(start, len(text) - GRAM)  # no place is noted: only the key is wanted
        if len(text) - start >= MANY:
            return self._note_many(corpora, text, max(start, GRAM), base)
        for place, token in enumerate(text[start:], start):
            if place >= GRAM:
                mixed = key * MIXER >> 31
                for corpus in corpora:
                    places[(mixed ^ corpus) & mask] = base | place
            key = (key << TOKEN_BITS ^ token) & KEY_MASK
        return key

    def _note_many(self, corpora: Collection[int], text: Tokens, start: int, base: int) -> int:
        """The same, faster where tokens are many; `start`: GRAM at least."""
        tokens = np.array(text[start - GRAM :], np.uint64)
        keys = np.zeros(len(tokens) - GRAM + 1, np.uint64)
        for place in range(GRAM):
            keys = np.left_shift(keys, TOKEN_BITS) ^ tokens[place : place + len(keys)]
        keys &= KEY_MASK
        own = np.array([corpus & self.mask for corpus in corpora], np.int64)
        slots = ((keys[:-1] * MIXER >> 31) & self.mask).astype(np.int64)[:, None] ^ own
        self.table[slots] = (base | np.arange(start, len(text)))[:, None]  # of equal slots the last wins
        return int(keys[-1])

    def find(self, corpus: int, row: Row) -> Match | None:
        """Return the newest agreement with the last tokens of a row, if there are GRAM at least."""
        entry = self.places[self.slot(corpus, row.key)]
        text = self.texts.get(entry >> 32)
        if text is None:
            return None
        place, own, n = entry & 0xFFFFFFFF, row.text, len(row.text)
        most, length = min(place, n, LONGEST), 0
        while length < most and text[place - 1 - length] == own[n - 1 - length]:
            length += 1
        return Match(text, place, n, length) if length >= GRAM else None


# ---- sources -----------------------------------------------------------------------------------------------------


class Source:
    """Drafts what followed the newest place in a corpus where the last tokens of a row have stood."""

    name: str
    prior = 0.3  # rate of acceptance before anything is known
    grows = False  # the corpus has the texts of rows under way

    def __init__(self, grams: Grams, number: int):
        self.grams, self.number = grams, number
        self.rest = self.asked = 0  # steps to rest after the step in which it was asked

    def key(self, sample: SampleId) -> tuple[int, ...]:
        """Return the name of the corpus that may help this sample."""
        raise NotImplementedError

    def corpus(self, sample: SampleId) -> int:
        return hash((self.number, *self.key(sample)))  # of numbers only: the same in every process

    def start(self, sample: SampleId) -> "Match | None":
        """Return the agreement that a row begins with."""
        return None

    def propose(self, row: Row) -> Match | None:
        """Return the agreement whose next tokens are drafted."""
        match, own = row.matches[self.number], row.text
        if match:
            text, place, seen, size, n = match.text, match.place, match.seen, len(match.text), len(own)
            while seen < n and place < size and text[place] == own[seen]:
                seen += 1
                place += 1
            if seen == n and place < size:
                match.length += seen - match.seen
                match.place, match.seen = place, n
                return match
        found = row.matches[self.number] = self.find(row)
        return found

    def find(self, row: Row) -> Match | None:
        return self.grams.find(row.corpora[self.number], row)


class OwnText(Source):
    """The row's own text."""

    name, grows = "own", True

    def key(self, sample: SampleId) -> tuple[int, ...]:
        return sample


class Siblings(Source):
    """The other responses to the prompt, as far as they were drawn here."""

    name, grows = "siblings", True

    def key(self, sample: SampleId) -> tuple[int, ...]:
        return sample.visit

    def find(self, row: Row) -> Match | None:
        found = super().find(row)
        return None if found and found.text is row.text else found


class Remembered(Source):
    """Texts of before the round, by `key`; each is noted when it is looked into first."""

    def __init__(self, grams: Grams, number: int):
        super().__init__(grams, number)
        self.open({})

    def open(self, texts: Mapping[SampleId, Tokens]) -> None:
        """Begin a round with these texts."""
        self.texts: dict[tuple[int, ...], list[Tokens]] = {}
        self.noted: set[tuple[int, ...]] = set()
        for sample, text in texts.items():
            self.texts.setdefault(self.key(sample), []).append(text)

    def find(self, row: Row) -> Match | None:
        key = self.key(row.sample)
        if key not in self.texts:
            return None
        if key not in self.noted:
            self.noted.add(key)
            for text in self.texts[key]:
                self.grams.note((row.corpora[self.number],), text, 0, 0)
        return super().find(row)


class LastEpoch(Remembered):
    """The responses to the prompt that were trained last."""

    name = "epoch"

    def key(self, sample: SampleId) -> tuple[int, ...]:
        return (sample.prompt,)


class OldText(Remembered):
    """The text that the sample itself had when it was aborted, or not trained: first what stands at the same place."""

    name, prior = "old", 0.9

    def key(self, sample: SampleId) -> tuple[int, ...]:
        return sample

    def start(self, sample: SampleId) -> Match | None:
        texts = self.texts.get(sample)
        return Match(texts[0], 0, 0, LONGEST) if texts else None


SOURCES: dict[str, type[Source]] = {source.name: source for source in (OldText, Siblings, LastEpoch, OwnText)}


@dataclass(frozen=True)
class DraftsConfig:
    sources: tuple[str, ...] = option(
        (),
        "where drafts come from, in rounds without a race, evaluations and endless rollouts (overlap.clock = time): "
        "old (what the sample itself had when it was aborted or not trained), siblings (other responses to the "
        "prompt), epoch (its responses of the last epoch), own (the response itself); none: no drafts. They change no "
        "token, but for rounding",
    )
    most: int = option(
        31, "tokens that a response drafts in a step, at most; how many pay is measured", min=1, max=MOST
    )
    ahead: bool = option(
        False,
        "replicas with nothing left to decode draw the next round's responses, which are its `old` texts then; only "
        "where nothing races in both rounds, as with scheduler.policy = synchronous",
    )
    memory_mib: float = option(
        16.0, "memory for texts of earlier rounds, over all ranks and in a checkpoint; the oldest go first", min=0.0
    )


class Texts:
    """Texts of earlier rounds by sample, as many as there is room for: the oldest go first."""

    def __init__(self, room: int):
        """`room`: for tokens."""
        self.room, self.texts, self.count = room, dict[SampleId, Tokens](), 0

    def put(self, sample: SampleId, text: Sequence[int]) -> None:
        """Remember a text. Of two, one of which begins the other, the longer stays: the rest may be drawn again."""
        if not text:
            return
        new = array("i", text)
        old = self.forget(sample)
        if old is not None and old[: len(new)] == new:
            new = old
        self.texts[sample] = new
        self.count += len(new)
        while self.count > self.room:
            self.forget(next(iter(self.texts)))

    def forget(self, sample: SampleId) -> Tokens | None:
        """Forget the text of a sample; return it, if there was one."""
        text = self.texts.pop(sample, None)
        self.count -= len(text or ())
        return text


# ---- how many ----------------------------------------------------------------------------------------------------


class Rates:
    """How often a source is right, by the tokens that agree before: of the newest few hundred tokens of each."""

    def __init__(self, priors: Sequence[float], most: int):
        """`most`: tokens of a draft."""
        shape, self.most = (len(priors), len(BINS)), most
        self.priors = np.array(priors)[:, None]
        self.right, self.wrong = np.zeros(shape), np.zeros(shape)
        self.steps = np.minimum(np.arange(LONGEST + 1)[:, None] + np.arange(most), LONGEST)  # [LONGEST + 1, most]
        self.bins = np.searchsorted(BINS, self.steps, side="right") - 1
        self.new = np.zeros((len(priors), LONGEST + most + 2))  # right tokens: where runs begin, less where they end
        self.failed = np.zeros((len(priors), LONGEST + most + 2))
        self.refresh()

    def observe(self, source: int, length: int, drafted: int, right: int) -> None:
        """Take in a draft after an agreement of `length` tokens, of which the first `right` were right."""
        length = min(length, LONGEST)
        self.news += drafted
        self.new[source, length] += 1
        self.new[source, length + right] -= 1
        self.failed[source, length + right] += right < drafted

    def refresh(self) -> None:
        """Bring `reach` [sources, agreement, most] up to date: the chance that a draft is right up to each token."""
        self.right += np.add.reduceat(self.new.cumsum(1), BINS, axis=1)
        self.wrong += np.add.reduceat(self.failed, BINS, axis=1)
        self.new[:], self.failed[:], self.news = 0, 0, 0
        known = self.right + self.wrong
        kept = np.minimum(1.0, NEWEST / np.maximum(known, 1.0))
        self.right *= kept
        self.wrong *= kept
        rates = (self.right + PRIOR * self.priors) / (self.right + self.wrong + PRIOR)  # [S, bins]
        self.reach = rates[:, self.bins].cumprod(2)

    @property
    def known(self) -> float:
        return float(self.right.sum() + self.wrong.sum())


class StepCosts:
    """Seconds of a step of `rows` with `drafted` tokens, from measured steps.

    Kinds of steps count alike, however often they came: else the last rows of a round would drown all others. Seconds
    without drafts are read off the measured ones, for no simple curve fits them: on a CPU the first rows cost most of
    what a hundred cost. What drafts add is fitted.
    """

    def __init__(self) -> None:
        self.kinds: dict[tuple[int, int], list[float]] = {}  # by the bits of rows and drafted: their means, and when
        self.count = 0
        # Rows and seconds without drafts. Before the first fit only ratios mean anything: a step, and each row.
        self.plain: list[tuple[float, float]] = [(0.0, 32.0), (1024.0, 32.0 + 1024.0)]
        self.weights, self.is_fitted = [32 * FIRST_DRAFTS, 0.0, 1.0, 0.0], False  # of the columns of `_drafts`

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        self.count += 1
        new = (rows, drafted, seconds)
        *means, seen, _ = self.kinds.get(key := (rows.bit_length(), drafted.bit_length()), [*new, 0, 0])
        new = rows, drafted, min(seconds, 2 * means[2])  # something else may have taken the processor:
        share = 1 / 32 if seconds >= means[2] else 1 / 4 if seen >= SEEN else 1.0  # so a lower quantile
        self.kinds[key] = [*(m + share * (x - m) for m, x in zip(means, new, strict=True)), seen + 1, self.count]

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many rows were measured without drafts."""
        return self.kinds.get((rows.bit_length(), 0), (0.0,) * 5)[3] >= SEEN

    def refit(self) -> None:
        self.kinds = {key: kind for key, kind in self.kinds.items() if kind[-1] > self.count - OLD_STEPS}
        known = [kind for kind in self.kinds.values() if kind[3] >= SEEN]
        plain = sorted((rows, seconds) for rows, drafted, seconds, *_ in known if not drafted)
        if len(plain) < FEWEST:  # else noise could make tokens seem free
            return
        _, row = fit([(1.0, rows) for rows, _ in plain], [seconds for _, seconds in plain])
        if not row:  # noise has hidden what a row costs: any number of wrong drafts would seem to pay
            return
        fewest, seconds = plain[0]
        self.plain, self.is_fitted = [(0.0, max(seconds - row * fewest, 0.0)), *plain], True
        self.weights = [FIRST_DRAFTS * seconds, 0.0, row, 0.0]  # a drafted token is taken for a row
        if len({round(drafted).bit_length() for _, drafted, *_ in known if drafted}) > 2:
            points = [(self.alone(rows), *self._drafts(rows, drafted)) for rows, drafted, *_ in known]
            _, *others, token, root = fit(points, [kind[2] for kind in known])
            if token or root:
                self.weights = [*others, token, root]

    @staticmethod
    def _drafts(rows: float, drafted: Any) -> tuple[Any, ...]:
        """Return what the seconds that drafts add grow with: some at all, rows, tokens, and their root."""
        some = (drafted > 0) * 1.0
        return some, some * rows, drafted, drafted**0.5

    def alone(self, rows: float) -> float:
        """Return the seconds of a step without drafts; of more rows than were measured, those of the most measured."""
        place = min(bisect(self.plain, (rows, inf)), len(self.plain) - 1)
        (a, low), (b, high) = self.plain[place - 1 : place + 1]
        return low + (high - low) * min((rows - a) / (b - a), 1.0)

    def seconds(self, rows: int, drafted: Any) -> Any:
        """Return the seconds of a step that drafts so many tokens, a number or an array of numbers."""
        some, times_rows, tokens, root = self._drafts(rows, drafted)
        a, b, c, d = self.weights
        return self.alone(rows) + a * some + b * times_rows + c * tokens + d * root


def choose(reach: np.ndarray, rows: int, seconds: np.ndarray) -> np.ndarray:
    """Return how many tokens each row of `reach` drafts, so that a second brings the most tokens.

    reach: the chance that a draft is right up to each token, 0 where it has none [drafts, most]; seconds of a step of
    `rows` that drafts 0, 1, ... tokens in all [drafts * most + 1]. The likeliest tokens go first. They are each
    draft's first ones, so no other choice of as many tokens is better; those of equal chance are taken from the end.
    """
    order = np.argsort(reach, axis=None, kind="stable")[::-1]
    tokens = rows + np.concatenate(([0.0], reach.ravel()[order].cumsum()))
    taken = np.zeros(reach.size, np.int64)
    taken[order[: int(np.argmax(tokens / seconds))]] = 1
    return taken.reshape(reach.shape).sum(1)


# ---- all of it ---------------------------------------------------------------------------------------------------


@dataclass
class DraftStats:
    """What was drafted since the newest `take`, by source, and what it was good for."""

    drafted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: int = 0  # that had drafts
    rows: int = 0  # in these steps
    kept: int = 0  # tokens that these rows drew
    won_seconds: float = 0.0  # estimated: steps without drafts would have taken as much longer for the same tokens
    brought_tokens: int = 0  # of older texts, from other ranks
    ahead_accepted: int = 0  # drafted, of these
    ahead_tokens: int = 0  # of the next round's responses, drawn by replicas that had nothing else to do


class Known(NamedTuple):
    """The rates and costs that a policy has measured, as plain values."""

    right: list[list[float]]  # [sources, bins]
    wrong: list[list[float]]
    plain: Sequence[tuple[float, float]]  # of the costs, as the next two
    weights: list[float]
    is_fitted: bool


class Gains(NamedTuple):
    """What drafts bring at most in a step of so many rows: tokens, less those that their seconds bring without them."""

    gains: list[list[float]]  # of a draft, by source and agreement
    most: list[float]  # of these, by source
    may_pay: list[Source]  # those that bring more first
    price: float  # a step with drafts pays if all of its drafts bring more


@dataclass(frozen=True, slots=True)
class Trial:
    """A guess that is not verified, but compared with the tokens from `start` on that the row has later."""

    row: Row
    source: int
    length: int
    start: int
    tokens: Tokens


class DraftPolicy:
    """The drafter of an engine for one round after the other. The ranks of a replica draft alike, if they `agree`."""

    def __init__(self, names: Sequence[str], most: int):
        """`names`: of SOURCES; `most`: tokens that a row drafts in a step."""
        self.grams, self.most = Grams(), most
        self.sources = [SOURCES[name](self.grams, number) for number, name in enumerate(names)]
        self.growing = [source.number for source in self.sources if source.grows]
        self.rates = Rates([source.prior for source in self.sources], most)
        self.costs, self.stats, self.is_alone = StepCosts(), DraftStats(), True
        self.gains: dict[int, Gains] = {}  # by rows
        self.awaited = Counter[int]()  # steps without drafts that were to be measured, by the bits of their rows
        self.places = np.arange(most)
        self.begin({}, {})

    def begin(
        self,
        old: Mapping[SampleId, Tokens],
        epoch: Mapping[SampleId, Tokens],
        ended: Mapping[SampleId, Sequence[int]] | None = None,
    ) -> None:
        """Begin a round. `old`: by the samples that are drawn again; `epoch`: trained responses to its prompts.

        `ended`: samples that were drawn here before it, siblings of others.
        """
        self.grams.forget()
        self.rows: dict[EngineSequence, Row] = {}
        self.trials: list[Trial] = []
        self.steps = self.num_rows = self.kept = 0
        self.asked: list[Source] = []
        self.tries = False
        for source in self.sources:
            source.rest = source.asked = 0
            if isinstance(source, Remembered):
                source.open(old if isinstance(source, OldText) else epoch)
        siblings = [source for source in self.sources if isinstance(source, Siblings)]
        for id, text in (ended or {}).items():
            self.grams.note([source.corpus(id) for source in siblings], array("i", text), 0, 0)

    def agree(self, told: Known, is_alone: bool) -> None:
        """Go on with the rates and costs of the replica's first rank; `is_alone`: it has no other rank."""
        self.rates.right, self.rates.wrong = np.array(told.right), np.array(told.wrong)
        self._refresh()
        self.costs.plain = [(rows, seconds) for rows, seconds in told.plain]
        self.costs.weights, self.costs.is_fitted, self.is_alone = list(told.weights), told.is_fitted, is_alone

    def tell(self) -> Known:
        """Return what `agree` needs, as plain values."""
        self.costs.refit()
        self._refresh()
        right, wrong = self.rates.right.tolist(), self.rates.wrong.tolist()
        return Known(right, wrong, self.costs.plain, self.costs.weights, self.costs.is_fitted)

    # ---- for the engine (engine/drafts.py) -----------------------------------------------------------------------

    def wants_rows(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have drafts, or a trial is due."""
        self.steps, self.num_rows = self.steps + 1, 0
        self.tries = is_due(self.steps, TRIAL_STEPS)
        may_pay = (self.gains.get(num_rows) or self._gains(num_rows)).may_pay if num_rows else []
        if may_pay and self.is_alone and not self._knows(num_rows):
            may_pay = []
        if may_pay:
            slow = max(self.costs.alone(num_rows) / REST_SECONDS, 1.0) if self.costs.is_fitted else 1.0
            longest = min(int(REST_ROWS * num_rows / slow), REST_STEPS)
            may_pay = [source for source in may_pay if self.steps - source.asked > min(source.rest, longest)]
        self.asked = may_pay
        return bool(self.asked or self.tries)

    def propose(self, rows: Sequence[tuple[EngineSequence, np.ndarray]]) -> Sequence[Sequence[int]]:
        """Return the tokens that may follow in each row: none where a draft does not pay."""
        self.num_rows = self.kept = len(rows)
        drafts: list[Sequence[int]] = [()] * len(rows)
        if self.tries:
            self._try(rows)
        if self.asked:
            drafted = self._draft([self._known(sequence, tokens) for sequence, tokens in rows], drafts)
            for source in self.asked:
                source.rest = 0 if source.number in drafted else min(2 * source.rest + 1, REST_STEPS)
                source.asked = self.steps
        return drafts

    def learn(self, outcome: Sequence[tuple[EngineSequence, int, int]]) -> None:
        """Take in how many tokens were drafted and verified in rows, and how many of them were right."""
        for sequence, drafted, right in outcome:
            source, length = self.rows[sequence].drafted
            self.rates.observe(source, length, drafted, right)
            self.stats.drafted[name := self.sources[source].name] += drafted
            self.stats.accepted[name] += right
            self.kept += right
        if self.rates.news > self.rates.known / 8:
            self._refresh()

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in the seconds of a step without prefill that has computed so many tokens."""
        drafted = tokens - (self.num_rows or tokens)  # no rows: they were not wanted
        knows = self.costs.knows(tokens - drafted)
        if not drafted and knows and self.steps % PLAIN_STEPS:
            return
        self.costs.observe(tokens - drafted, drafted, seconds)
        is_new = not knows and self.costs.knows(tokens - drafted)
        if self.is_alone and (is_new or is_due(self.costs.count, REFIT_STEPS)):
            self.costs.refit()
            self.gains = {}
        if is_new:  # if it is forgotten, it is measured once more
            self.awaited.pop((tokens - drafted).bit_length(), None)
        if drafted:
            plain = self.costs.alone(self.num_rows)
            self.stats.steps += 1
            self.stats.rows += self.num_rows
            self.stats.kept += self.kept
            self.stats.won_seconds += (self.kept / self.num_rows * plain - seconds) * self.costs.is_fitted

    def take_stats(self) -> DraftStats:
        taken, self.stats = self.stats, DraftStats()
        return taken

    # ---- a step --------------------------------------------------------------------------------------------------

    def _knows(self, num_rows: int) -> bool:
        """Whether what drafts save is known, or has not become known for long: steps with prefill are not measured."""
        if self.costs.knows(num_rows):
            return True
        self.awaited[num_rows.bit_length()] += 1
        return self.awaited[num_rows.bit_length()] > PATIENCE

    def _refresh(self) -> None:
        self.rates.refresh()
        self.gains = {}

    def _gains(self, num_rows: int) -> "Gains":
        if num_rows not in self.gains:
            most = num_rows * self.most
            plain, first, last = (self.costs.seconds(num_rows, drafted) for drafted in (0, 1, most))
            token = min(first - plain, (last - first) / max(most - 1, 1))  # in the mean, or the first
            drafts = first - token - plain
            gains = np.maximum(self.rates.reach - token * num_rows / plain, 0.0).sum(2)
            gains[:, :GRAM] = 0.0  # shorter agreements are not drafted from
            price, best = drafts * num_rows / plain, gains.max(1)
            may_pay = [self.sources[i] for i in np.argsort(-best, kind="stable") if best[i] * num_rows > price]
            self.gains[num_rows] = Gains(gains.tolist(), best.tolist(), may_pay, price)
        return self.gains[num_rows]

    def _known(self, sequence: EngineSequence, tokens: np.ndarray) -> Row:
        """Return a row with all its tokens."""
        row = self.rows.get(sequence)
        if row is None:
            row = self.rows[sequence] = Row(sequence.id, self.sources)
        if (start := len(row.text)) < len(tokens):
            row.text.extend(tokens[start:].tolist())
            row.key = self.grams.note([row.corpora[i] for i in self.growing], row.text, start, row.key)
        return row

    def _draft(self, rows: Sequence[Row], drafts: list[Sequence[int]]) -> set[int]:
        """Write the drafts that pay into their places; return the numbers of their sources."""
        found, total = list[tuple[int, int, Match]](), 0.0
        gains, most, _, price = self._gains(self.num_rows)
        for i, row in enumerate(rows):
            best = 0.0
            for source in self.asked:
                if most[number := source.number] <= best:
                    break  # nor do those that are asked later bring more
                match = source.propose(row)
                if match and (gain := gains[number][min(match.length, LONGEST)]) > best:
                    best, chosen = gain, (i, number, match)
            if best:
                found.append(chosen)
                total += best
        if total <= price:
            return set()
        numbers = [number for _, number, _ in found]
        lengths = [min(match.length, LONGEST) for *_, match in found]
        there = [self.most if match.text is rows[i].text else len(match.text) - match.place for i, _, match in found]
        reach = self.rates.reach[numbers, lengths] * (self.places < np.array(there)[:, None])
        seconds = self.costs.seconds(self.num_rows, np.arange(reach.size + 1))
        counts = choose(reach, self.num_rows, seconds).tolist()
        for (i, number, match), count in zip(found, counts):
            if count:
                rows[i].drafted = number, match.length
                drafts[i] = following(rows[i], match, count)
        return {number for (_, number, _), count in zip(found, counts) if count}

    def _try(self, rows: Sequence[tuple[EngineSequence, np.ndarray]]) -> None:
        """Compare the trials under way with what was drawn; note new ones, in other rows each time."""
        tried = {id(trial.row) for trial in self.trials}
        for sequence, tokens in rows:
            if id(self.rows.get(sequence)) in tried:
                self._known(sequence, tokens)
        for trial in self.trials:
            drawn, right = trial.row.text[trial.start : trial.start + len(trial.tokens)], 0
            while right < len(drawn) and drawn[right] == trial.tokens[right]:
                right += 1
            self.rates.observe(trial.source, trial.length, len(drawn), right)
        self._refresh()
        start = self.steps % len(rows)
        self.trials = [
            Trial(row, source.number, match.length, len(row.text), following(row, match, self.most))
            for row in [self._known(*row) for row in (*rows[start:], *rows[:start])[:TRIAL_ROWS]]
            for source in self.sources
            if (match := source.propose(row))
        ]


def is_due(count: int, every: int) -> bool:
    """Whether the number is a multiple, or a power of two before the first."""
    return count % every == 0 or (count < every and not count & (count - 1))


def following(row: Row, match: Match, count: int) -> Tokens:
    """Return the tokens, at most `count`, that follow in the other text; a row's own text goes on in a loop."""
    tokens = match.text[match.place : match.place + count]
    while match.text is row.text and len(tokens) < count:
        tokens = (tokens + tokens)[:count]
    return tokens
