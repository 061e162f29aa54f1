"""Steps that verify drafts: with any drafter, tokens, log-probs, ends and books are those of decoding without one."""

from collections import abc
from random import Random

import numpy as np
import pytest
import torch
from conftest import FusedEngine
from test_rollout import check_invariants, drain, generate, make_engine, make_sequences

from core import Sample, SampleId
from engine.sequence import Sequence
from model import Model
from rollout import Engine

kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])
Rows = abc.Sequence[tuple[Sequence, np.ndarray]]


@pytest.fixture
def model(tiny_model: Model) -> Model:
    """Large weights: every token depends on the whole context."""
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return tiny_model


class Foresight:
    """Knows what decoding without drafts drew, and proposes that, as wrongly as it is told to; checks what it is told.

    longest: tokens of a draft; right: the probability that a token of it is right; asked: that a row gets one at all.
    """

    def __init__(self, texts: dict, longest: int = 7, right: float = 1.0, asked: float = 1.0, seed: int = 0):
        self.texts, self.longest, self.right, self.asked = texts, longest, right, asked
        self.rng, self.drafted, self.accepted, self.tokens, self.steps = Random(seed), 0, 0, 0, 0

    def propose(self, rows: Rows) -> list[list[int]]:
        rng, drafts = self.rng, []
        for s, text in rows:
            known = self.texts[s.id]
            assert text.tolist() == list(known[: len(text)])
            rest = known[len(text) : len(text) + rng.randint(0, self.longest)] if rng.random() < self.asked else []
            drafts.append([t if rng.random() < self.right else rng.randrange(2, 256) for t in rest])
            drafts[-1] += [7] * (len(rest) == len(known) - len(text)) * self.longest  # behind the end
        return drafts

    def learn(self, outcome: abc.Sequence[tuple[Sequence, int, int]]) -> None:
        assert all(0 <= accepted <= drafted > 0 for _, drafted, accepted in outcome)
        self.drafted += sum(drafted for _, drafted, _ in outcome)
        self.accepted += sum(accepted for _, _, accepted in outcome)

    def observe(self, tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens


def texts_of(samples: dict[SampleId, Sample]) -> dict[SampleId, list[int]]:
    return {id: [*sample.token_ids] for id, sample in samples.items()}


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for id, sample in wanted.items():
        other = found[id]
        assert other.token_ids == sample.token_ids and other.finish_reason == sample.finish_reason
        assert other.spans == sample.spans and list(other.logprobs) == pytest.approx(sample.logprobs, abs=1e-4)


@kinds
@pytest.mark.parametrize("right", [1.0, 0.8, 0.0])
def test_tokens_are_those_without_drafts(model, kind, right: float) -> None:
    plain, engine = make_engine(model, kind=kind), make_engine(model, kind=kind)
    wanted = generate(plain, make_sequences(8))
    engine.drafter = drafter = Foresight(texts_of(wanted), right=right)
    for s in make_sequences(8):
        engine.add(s)
    assert_same(drain(engine, check_invariants), wanted)
    assert (engine.stats.drafted_tokens, engine.stats.accepted_tokens) == (drafter.drafted, drafter.accepted)
    assert engine.stats.decoded_tokens == plain.stats.decoded_tokens
    assert engine.stats.decode_steps <= 39 and (engine.stats.decode_steps < 39) == (right > 0)
