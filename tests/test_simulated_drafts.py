"""Drafts in the simulator: steps and tokens of a replica, its pages, whole runs."""

import math
from random import Random

import pytest
from test_simulate import PAGES, config

from config import ConfigError, load_config
from core import SampleId
from policies.replica import Replica, Response
from settings import Config
from simulate import ModelFile, SimulationConfig, load_hardware, simulate
from simulation.costs import Costs
from simulation.drafts import DraftingReplica, DraftsConfig

H100 = Costs(load_hardware("h100"), ModelFile().shape, ModelFile().efficiency)
LENGTHS = [1, 2, 40, 41, 250, 400]


def play(drafts: DraftsConfig, num_pages: int = PAGES, lengths: list[int] = LENGTHS) -> DraftingReplica:
    """Play responses on one replica, window by window."""
    replica = DraftingReplica(drafts, Random(1), H100, num_pages, 8)
    for i, length in enumerate(lengths):
        replica.add(Response(SampleId(0, i, 0), 20, length))
    ended = dict[SampleId, int]()
    while replica.running or replica.waiting:
        for event, _ in replica.run_until(replica.iteration + 16):
            ended[event.id] = event.num_tokens
        contexts = [20 + s.done + replica.iteration - s.start - 1 for s in replica.running.values()]
        assert replica.pages_used == sum(-(-n // 8) for n in contexts) <= num_pages
    assert ended == {SampleId(0, i, 0): length for i, length in enumerate(lengths)}
    assert replica.decoded == sum(lengths)
    return replica


def test_whole_texts_that_are_right_take_a_step_for_each_draft_and_its_next_token() -> None:
    replica = play(DraftsConfig(most=7, agreement=1.0), lengths=[401])
    assert (replica.accepted, replica.drafted) == (350, 350)  # the prefill has drawn the first
    assert not any(replica.plain), "steps with drafts are no plain steps"
    assert replica.iteration == 64, "51 steps, to the end of a window"


def test_rare_differences_leave_most_of_what_was_drafted() -> None:
    never, soon = (
        play(DraftsConfig(most=7, agreement=0.98, regain=0)),
        play(DraftsConfig(most=7, agreement=0.98, regain=4)),
    )
    assert 0 < never.accepted < soon.accepted
    assert never.accepted < never.drafted and soon.clock < never.clock


def test_of_a_text_that_reaches_a_part_of_a_response_the_rest_is_drawn_token_by_token() -> None:
    replica = play(DraftsConfig(most=7, agreement=1.0, known=0.5), lengths=[400])
    assert (replica.plain[0], replica.accepted) == (200 - 1, 7 * 25)


@pytest.mark.parametrize("pages", [53, 60, 100])
def test_few_pages_preempt_and_lose_nothing(pages: int) -> None:
    replica = play(DraftsConfig(most=7, agreement=0.95, regain=3), pages, [200, 300, 350, 390, 400])
    assert replica.preemptions and replica.accepted


def test_rows_that_have_no_text_decode_as_without_drafts() -> None:
    replica, plain = play(DraftsConfig(most=7, known=0.0)), Replica(H100, PAGES, 8)
    for i, length in enumerate(LENGTHS):
        plain.add(Response(SampleId(0, i, 0), 20, length))
    plain.run_until(math.inf)
    assert (replica.drafted, replica.iteration) == (0, -(-plain.iteration // 16) * 16)
    assert replica.clock == pytest.approx(plain.clock)


@pytest.mark.slow
def test_a_run_drafts_in_long_rounds_and_trains_the_same() -> None:
    def run(**drafts):
        return simulate(config(stream={"policy": "off"}, drafts=drafts))

    plain, drafting = run(), run(most=8, regain=8)
    assert [sorted(ids) for ids in plain.trained] == [sorted(ids) for ids in drafting.trained]
    for before, after in zip(plain.records, drafting.records, strict=True):
        if after["round"]["kind"] == "short":
            assert after["seconds"]["rollout"] == pytest.approx(before["seconds"]["rollout"])
        else:
            assert 0 < after["drafts"]["accepted"] <= after["drafts"]["drafted"]
            assert after["seconds"]["rollout"] < before["seconds"]["rollout"]
    assert {"short", "long"} == {record["round"]["kind"] for record in drafting.records}


def test_rounds_of_dynamic_sampling_have_no_drafts_as_in_real_runs() -> None:
    run = simulate(config(stream={"policy": "off"}, scheduler={"dynamic_sampling": True}, drafts={"most": 8}))
    assert "long" in {record["round"]["kind"] for record in run.records}
    assert not any("drafts" in record for record in run.records)


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafts.most = 0"):
        simulate(config(drafts={"lag": 2.0}))


def test_a_real_run_and_a_simulated_one_take_the_same_longest_draft() -> None:
    assert load_config(SimulationConfig, None, ["--drafts.most=256"]).drafts.most == 256
    assert load_config(Config, None, ["--drafts.most=256"]).drafts.most == 256
    for kind in (SimulationConfig, Config):
        with pytest.raises(ConfigError, match="drafts.most"):
            load_config(kind, None, ["--drafts.most=257"])
