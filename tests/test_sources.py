"""Sources of drafts and the policy that chooses how much of them is drafted, on made-up responses and step times."""

import json
from array import array
from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest

from core import SampleId
from engine.sequence import Sequence
from policies import drafts
from policies.drafts import (
    GRAM,
    LONGEST,
    MANY,
    PATIENCE,
    SOURCES,
    DraftPolicy,
    Grams,
    Known,
    Match,
    Rates,
    Remembered,
    Row,
    StepCosts,
    choose,
)

MOST = 8
COSTS = (1.0, 0.02, 0.01, 0.1)  # seconds of a step, a row, a drafted token, a step with drafts


def seconds_of(rows: int, drafted: int, costs: tuple[float, ...] = COSTS) -> float:
    return costs[0] + costs[1] * rows + costs[2] * drafted + costs[3] * (drafted > 0)


class Toy:
    """An engine whose rows draw given texts. It checks all that the policy proposes, and adds up seconds."""

    def __init__(self, policy: DraftPolicy, texts: dict[SampleId, list[int]], costs: tuple[float, ...] = COSTS):
        self.policy, self.texts, self.costs = policy, texts, costs
        self.drafted, self.accepted, self.steps, self.seconds = 0, 0, 0, 0.0
        self.proposed: list[list[list[int]]] = []

    def play(self) -> None:
        rows = {Sequence(id.prompt, id.response, id.epoch, (1,), 0, 10**6): 1 for id in self.texts}
        while rows:
            drawn = [(s, np.array(self.texts[s.id][:count])) for s, count in rows.items()]
            wants = self.policy.wants_rows(len(rows))
            drafts = [[*draft] for draft in (self.policy.propose(drawn) if wants else [()] * len(rows))]
            self.proposed.append(drafts)
            assert all(len(draft) <= self.policy.most for draft in drafts)
            outcome = []
            for s, draft in zip([*rows], drafts, strict=True):
                rest = self.texts[s.id][rows[s] :]
                del draft[max(len(rest) - 1, 0) :]
                right = next((i for i, token in enumerate(draft) if token != rest[i]), len(draft))
                outcome += [(s, len(draft), right)] if draft else []
                rows[s] += right + 1
            drafted = sum(count for _, count, _ in outcome)
            self.policy.learn(outcome)
            seconds = seconds_of(len(rows), drafted, self.costs)
            self.policy.observe(len(rows) + drafted, seconds)
            self.steps, self.seconds = self.steps + 1, self.seconds + seconds
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + sum(right for *_, right in outcome)
            rows = {s: count for s, count in rows.items() if count < len(self.texts[s.id])}


def random_text(rng: Random, length: int, vocab: int = 1000) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def random_texts(rng: Random, prompts: int = 4, responses: int = 4, length: int = 120) -> dict[SampleId, list[int]]:
    ids = product(range(prompts), range(responses))
    return {SampleId(1, p, r): random_text(rng, rng.randint(length // 2, length)) for p, r in ids}


@pytest.mark.parametrize("vocab", [3, 1000, 2**31])
@pytest.mark.parametrize("start", [0, 1, 50])
def test_tokens_noted_at_once_are_those_noted_one_by_one(start: int, vocab: int, monkeypatch) -> None:
    rng, corpora, found = Random(start), (hash((1, 2)), -hash((3, 4, 5))), []
    text = array("i", random_text(rng, 300, vocab))
    for many in (1000, MANY):
        monkeypatch.setattr(drafts, "MANY", many)
        grams = Grams()
        key = grams.note(corpora, text[:start], 0, 0) if start else 0
        key = grams.note(corpora, text, start, key)
        found.append((key, grams.places, grams.note((), text, 0, 0)))
    assert found[0] == found[1] and sum(map(bool, found[0][1])) > (17 if vocab == 3 else 500)


def packed(texts: dict[SampleId, list[int]]) -> dict[SampleId, array]:
    return {id: array("i", text) for id, text in texts.items()}


def plain_seconds(texts: dict[SampleId, list[int]], costs: tuple[float, ...] = COSTS) -> float:
    """Return the seconds of the same texts without drafts; the first token of each is there already."""
    steps = range(1, max(map(len, texts.values())))
    return sum(seconds_of(sum(len(text) > step for text in texts.values()), 0, costs) for step in steps)


# ---- sources -----------------------------------------------------------------------------------------------------


def test_old_text_is_drafted_from_its_place_and_after_a_difference_where_tokens_agree_again() -> None:
    rng = Random(1)
    texts = random_texts(rng)
    old = {id: [*text[:40], 7, 7, *text[40:]] for id, text in texts.items()}
    policy = DraftPolicy(("old",), MOST)
    policy.begin(packed(old), {})
    toy = Toy(policy, texts)
    toy.play()
    assert toy.accepted > 0.7 * sum(map(len, texts.values())) and toy.steps < 40
    assert toy.seconds < 0.5 * plain_seconds(texts)
    stats = policy.take_stats()
    assert (stats.drafted["old"], stats.accepted["old"]) == (toy.drafted, toy.accepted)
    assert not policy.take_stats().drafted


@pytest.mark.parametrize("name", ["siblings", "epoch", "own"])
def test_a_source_drafts_only_what_stood_behind_the_same_tokens_in_its_corpus(name: str) -> None:
    rng = Random(2)
    common = random_text(rng, 60)
    texts = {SampleId(1, p, r): [p, r, *common, *common] for p in (0, 1) for r in (0, 1, 2)}
    told = {id: text[: 2 + 10 * id.response] for id, text in texts.items()}
    grams = Grams()
    [source] = sources = [SOURCES[name](grams, 0)]
    if isinstance(source, Remembered):
        source.open({SampleId(0, 0, 0): array("i", [3, *common])})
    rows = {id: Row(id, sources) for id in texts}
    for id, row in rows.items():
        row.text.extend(told[id])
        row.key = grams.note(row.corpora if source.grows else (), row.text, 0, 0)
    found = {id: source.propose(row) for id, row in rows.items()}
    if name == "own":
        assert not any(found.values())  # no run of tokens has come twice
        row = rows[SampleId(1, 0, 0)]
        row.text.extend([5, 6, 5, 6, 5])
        grams.note(row.corpora, row.text, 2, row.key)
    elif name == "epoch":  # of prompt 0 only, and where tokens agree
        assert [id for id, match in found.items() if match] == [SampleId(1, 0, 1), SampleId(1, 0, 2)]
        assert [*found[SampleId(1, 0, 2)].text[21:]] == common[20:] and found[SampleId(1, 0, 2)].length == 20
    else:  # the sibling that has gone on further
        assert {id for id, match in found.items() if match} == {SampleId(1, p, 1) for p in (0, 1)}
        for p in (0, 1):
            match = found[SampleId(1, p, 1)]
            assert [*match.text[match.place :]] == common[10:20] and match.text is rows[SampleId(1, p, 2)].text


def test_own_text_goes_on_in_a_loop_for_as_many_tokens_as_are_wanted() -> None:
    loop = {SampleId(1, 0, 0): [*range(20, 40), *([4, 5, 6, 7] * 50)]}
    policy = DraftPolicy(("own",), 16)
    toy = Toy(policy, loop)
    toy.play()
    assert toy.steps < 80 and max(len(draft) for [draft] in toy.proposed) == 16


def test_texts_of_a_round_are_forgotten_and_the_table_of_places_stays_as_large() -> None:
    policy, rng = DraftPolicy(("own", "siblings", "old"), MOST), Random(3)
    size = len(policy.grams.places)
    for _ in range(3):
        texts = random_texts(rng)
        policy.begin(packed(texts), {})
        Toy(policy, texts).play()
        assert len(policy.rows) == len(texts) and len(policy.grams.texts) <= 2 * len(texts)
    assert len(policy.grams.places) == size
    policy.begin({}, {})
    assert not policy.rows and not policy.grams.texts and not policy.trials


def test_runs_that_share_a_slot_are_never_taken_for_each_other() -> None:
    grams, rng = Grams(bits=2), Random(4)  # four slots
    [source] = sources = [SOURCES["own"](grams, 0)]
    row = Row(SampleId(0, 0, 0), sources)
    found = 0
    for token in random_text(rng, 2000, vocab=5):
        row.text.append(token)
        row.key = grams.note(row.corpora, row.text, len(row.text) - 1, row.key)
        if match := source.find(row):
            found += 1
            assert match.length >= GRAM and row.text[match.place - GRAM : match.place] == row.text[-GRAM:]
    assert found > 20


# ---- how many ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_brings_the_most_tokens_a_second_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts, most, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(3, 6))
    reach = rng.choice([1.0, 0.9, 0.5, 0.2, 0.0], (drafts, most)).cumprod(1)
    seconds = rng.choice([0.0, 0.3], ()) + rng.uniform(0.5, 2) + np.sort(rng.uniform(0, 3, drafts * most + 1))

    def rate(counts: tuple[int, ...]) -> float:
        return (rows + sum(reach[i, :count].sum() for i, count in enumerate(counts))) / seconds[sum(counts)]

    best = max(map(rate, product(range(most + 1), repeat=drafts)))
    chosen = choose(reach, rows, seconds)
    assert rate(tuple(chosen.tolist())) == pytest.approx(best)
    assert all(reach[i, count - 1] for i, count in enumerate(chosen.tolist()) if count)


def test_nothing_is_drafted_where_a_token_costs_more_than_it_brings() -> None:
    costs, rng = (0.0, 1.0, 1.0, 0.0), Random(5)  # a step costs by its tokens only
    texts = random_texts(rng)
    policy = DraftPolicy(("old", "own"), MOST)
    policy.costs.plain, policy.costs.weights = [(0.0, 0.0), (1024.0, 1024.0)], [0.0, 0.0, 1.0, 0.0]
    policy.begin(packed(texts), {})
    toy = Toy(policy, texts, costs)
    toy.play()
    assert not toy.drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_is_always_wrong_costs_little(name: str, monkeypatch) -> None:
    wrong = array("i", [2000] * 100)
    monkeypatch.setattr(SOURCES[name], "propose", lambda self, row: Match(wrong, 0, len(row.text), LONGEST))
    rng, most = Random(6), 16
    texts = random_texts(rng, 8, 8, 400)
    policy, taken = DraftPolicy((name,), most), []
    for _ in range(3):
        policy.begin({}, {})
        toy = Toy(policy, texts)
        toy.play()
        taken.append(toy.seconds / plain_seconds(texts))
        assert not toy.accepted
    assert max(taken) < 1.03 and taken[-1] < 1.01, taken


def test_a_source_that_gets_better_is_found_again_without_a_draft() -> None:
    texts = random_texts(Random(7), 8, 8, 200)
    policy = DraftPolicy(("old",), MOST)
    for _ in range(4):
        policy.begin(packed({id: [2000] * 200 for id in texts}), {})
        wrong = Toy(policy, texts)
        wrong.play()
    assert wrong.drafted < 8
    seconds = []
    for _ in range(4):
        policy.begin(packed(texts), {})
        right = Toy(policy, texts)
        right.play()
        seconds.append(right.seconds / plain_seconds(texts))
    assert wrong.seconds == pytest.approx(plain_seconds(texts), rel=0.02) and seconds[-1] < 0.6, seconds


def test_rates_follow_the_length_of_the_agreement_and_forget() -> None:
    rates = Rates([0.5], MOST)
    for _ in range(200):
        rates.observe(0, GRAM, 4, 0)
        rates.observe(0, 30, 4, 3)
    rates.refresh()
    reach = rates.reach[0]
    assert reach[GRAM, 0] < 0.05 and reach[30, 0] > 0.95
    assert reach[30, 1] > 0.9 and reach[30, 3] < 0.3  # the fourth, after 33 agreeing tokens, is wrong
    for _ in range(2000):
        rates.observe(0, GRAM, 1, 1)
    rates.refresh()
    assert rates.reach[0, GRAM, 0] > 0.7


def test_costs_are_fitted_to_kinds_of_steps_however_rare_and_to_no_outlier() -> None:
    costs, rng = StepCosts(), Random(8)
    for i in range(3000):
        rows = 1 if i > 500 else rng.choice((8, 16, 64))
        drafted = rng.choice((0, 3, 10, 100)) if i % 20 == 0 else 0
        noise = 50.0 if i % 97 == 0 and i else 1.0
        costs.observe(rows, drafted, noise * seconds_of(rows, drafted))
    costs.refit()
    for rows, drafted in product((1, 64), (0, 100)):
        assert costs.seconds(rows, np.array(drafted)) == pytest.approx(seconds_of(rows, drafted), rel=0.3)


def test_costs_follow_seconds_that_rise_less_with_each_row() -> None:
    costs, rng = StepCosts(), Random(11)

    def taken(rows: int, drafted: int) -> float:
        plain = 256e-6 + 60e-6 * rows**0.5
        return plain + (6e-6 * drafted + 200e-6 if drafted else 0.0)

    for _ in range(3000):
        rows, drafted = rng.choice((1, 2, 5, 12, 24, 48, 96, 200)), rng.choice((0, 0, 3, 10, 40, 150, 600))
        costs.observe(rows, drafted, taken(rows, drafted) * rng.uniform(1.0, 1.2))
    costs.refit()
    for rows, drafted in product((1, 5, 24, 200), (0, 10, 100, 500)):
        assert costs.seconds(rows, np.array(drafted)) == pytest.approx(taken(rows, drafted), rel=0.15)


def test_costs_of_drafts_that_add_little_are_not_lost_in_noise() -> None:
    for seed in range(12):
        costs, rng = StepCosts(), Random(seed)
        for _ in range(3000):
            rows, drafted = rng.choice((1, 8, 64, 200)), rng.choice((0, 0, 1, 3, 10, 40, 150, 600))
            taken = 300e-6 + 1e-6 * rows + (20e-6 + 6e-6 * drafted) * (drafted > 0)
            costs.observe(rows, drafted, taken * rng.lognormvariate(0.0, 0.2))
        costs.refit()
        [plain, many] = costs.seconds(200, np.array([0, 600]))
        assert 0.6 < (many - plain) / (20e-6 + 6e-6 * 600) < 1.4, seed


def test_steps_of_so_many_rows_have_no_drafts_before_some_were_measured_without() -> None:
    texts = random_texts(Random(12), 4, 4, 100)
    policy = DraftPolicy(("old",), MOST)
    policy.begin(packed(texts), {})
    toy = Toy(policy, texts)
    toy.play()
    assert not any(map(any, toy.proposed[:3])) and any(map(any, toy.proposed[3:10]))


def test_where_steps_without_drafts_cannot_be_measured_there_are_drafts_in_the_end(monkeypatch) -> None:
    texts = random_texts(Random(13), 4, 4, 100)
    policy = DraftPolicy(("old",), MOST)
    monkeypatch.setattr(policy, "observe", lambda *_: None)  # as when each step has prefill
    policy.begin(packed(texts), {})
    toy = Toy(policy, texts)
    toy.play()
    assert toy.accepted and toy.steps > PATIENCE


def test_a_policy_that_goes_on_from_a_checkpoint_counts_the_seconds_that_it_wins_at_once() -> None:
    texts = random_texts(Random(10), 16, 8, 60)
    policies = [DraftPolicy(("old",), MOST) for _ in range(2)]
    policies[0].begin({}, {})
    Toy(policies[0], texts).play()
    policies[1].agree(Known(*json.loads(json.dumps(policies[0].tell()))), is_alone=True)
    policies[1].begin(packed(texts), {})
    Toy(policies[1], dict([*texts.items()][:1])).play()  # too few rows for a fit of its own
    assert policies[1].take_stats().won_seconds > 0


def test_a_source_that_finds_nothing_is_asked_seldom_more_so_where_rows_are_many() -> None:
    asked = Counter[int]()
    for rows in (1, 4):
        policy = DraftPolicy(("own",), MOST)
        policy.begin({}, {})
        drawn = [(Sequence(i, 0, 0, (1,), 0, 10**6), np.arange(i, i + 400)) for i in range(rows)]
        for step in range(1, 300):
            policy.tries = False
            if policy.wants_rows(rows) and policy.asked:
                asked[rows] += 1
                assert not any(policy.propose([(s, text[:step]) for s, text in drawn]))
            policy.observe(rows, seconds_of(rows, 0))
    assert 20 < asked[1] < 60 and 0 < asked[4] < asked[1] / 2, asked


@pytest.mark.parametrize(("seconds", "most"), [(1e-3, 60), (1.0, 300)])
def test_where_steps_take_long_a_source_is_asked_in_each(seconds: float, most: int) -> None:
    policy, asked = DraftPolicy(("own",), MOST), 0
    policy.begin({}, {})
    policy.costs.plain, policy.costs.is_fitted = [(0.0, seconds), (1.0, seconds)], True
    policy.costs.weights = [seconds / 5, 0.0, seconds / 50, 0.0]
    policy.costs.kinds[1, 0] = [1.0, 0.0, seconds, 99, 0]
    sequence, text = Sequence(0, 0, 0, (1,), 0, 10**6), np.arange(400)
    for step in range(1, 300):
        policy.tries = False
        if policy.wants_rows(1) and policy.asked:
            asked += 1
            assert not any(policy.propose([(sequence, text[:step])]))
    assert most - 60 <= asked < most and asked > 15


# ---- ranks of a replica ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_with_the_same_history_draft_alike_however_long_their_own_steps_take() -> None:
    rng, plays = Random(9), []
    texts = random_texts(rng, 4, 4, 200)
    old = packed({id: [t if rng.random() < 0.97 else 1 for t in text] for id, text in texts.items()})
    first, second = DraftPolicy((*SOURCES,), MOST), DraftPolicy((*SOURCES,), MOST)
    Toy(first, texts).play()  # has seen more than the other
    told = first.tell()
    for policy, costs in ((first, COSTS), (second, (1.0, 0.9, 0.9, 0.0))):
        policy.agree(told, is_alone=False)
        policy.begin(old, old)
        toy = Toy(policy, texts, costs)
        toy.play()
        plays.append(toy.proposed)
    assert plays[0] == plays[1] and Counter(len(d) for step in plays[0] for d in step)[MOST]
