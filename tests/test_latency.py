"""Drawn latencies: their distributions, what they are a function of, and texts that name none."""

import math
import statistics
from pathlib import Path

import pytest

from config import ConfigError
from core import SampleId
from envs.latency import Latency

IDS = [SampleId(0, prompt, response) for prompt in range(100) for response in range(10)]


def drawn(latency: Latency, turns: int = 4) -> list[float]:
    return [latency.seconds(7, id, turn) for id in IDS for turn in range(turns)]


@pytest.mark.parametrize("name", ["normal", "lognormal"])
def test_seconds_have_the_given_mean_and_deviation(name: str) -> None:
    seconds = drawn(Latency(f"{name}(10, 2.5)"))
    assert statistics.mean(seconds) == pytest.approx(10, abs=0.15)
    assert statistics.stdev(seconds) == pytest.approx(2.5, abs=0.15)
    skew = statistics.mean((s - 10) ** 3 for s in seconds) / 2.5**3
    assert skew == pytest.approx(0.0 if name == "normal" else 3 * 0.25 + 0.25**3, abs=0.25)


def test_no_answer_comes_before_its_turn() -> None:
    seconds = drawn(Latency("normal(10,10)"))
    assert min(seconds) == 0.0 and seconds.count(0.0) / len(seconds) == pytest.approx(0.159, abs=0.02)


def test_recorded_seconds_are_drawn_as_often_as_they_are_there(tmp_path: Path) -> None:
    file = tmp_path / "seconds"
    file.write_text('1\n2.5\n{"seconds": 1, "turn": 3}\n1e1\n')
    seconds = drawn(Latency(f"recorded {file}"))
    assert {*seconds} == {1.0, 2.5, 10.0} and seconds.count(1.0) / len(seconds) == pytest.approx(0.5, abs=0.03)


def test_seconds_are_a_function_of_seed_sample_turn_and_attempt() -> None:
    latency, other, id = Latency("normal(10,5)"), Latency("normal(10,5)"), SampleId(1, 2, 3)
    assert latency.seconds(7, id, 4) == other.seconds(7, id, 4) == 14.985396069763194
    ways = [(7, id, 4, 0), (8, id, 4, 0), (7, SampleId(1, 2, 4), 4, 0), (7, id, 5, 0), (7, id, 4, 1)]
    assert len({latency.seconds(*way) for way in ways}) == len(ways)


def test_an_episode_is_slow_or_stops_in_all_its_turns() -> None:
    plain, failing = Latency("lognormal(10,5)"), Latency("lognormal(10,5)", slow="0.1x10", stop=0.05)
    factors = [{failing.seconds(7, id, turn) / plain.seconds(7, id, turn) for turn in range(3)} for id in IDS]
    assert all(len({round(factor, 6) for factor in of} - {math.inf}) + (math.inf in of) == 1 for of in factors)
    kinds = [round(of.pop(), 6) for of in factors]
    assert {*kinds} == {1.0, 10.0, math.inf}
    assert kinds.count(10.0) / len(kinds) == pytest.approx(0.095, abs=0.03)
    assert kinds.count(math.inf) / len(kinds) == pytest.approx(0.05, abs=0.02)


def test_without_options_an_answer_takes_no_time() -> None:
    assert {*drawn(Latency(""))} == {0.0} and math.inf in drawn(Latency("", stop=0.5))


@pytest.mark.parametrize(
    "text", ["normal", "normal(10)", "normal(0,1)", "normal(1,-1)", "gamma(1,1)", "10", "normal(1e999,1)"]
)
def test_a_text_without_a_distribution_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="env.latency = .*give normal"):
        Latency(text)


@pytest.mark.parametrize("text", ["0.01", "0.01x", "x10", "1.5x10", "0.01x0.5", "0.01x1e999", "slow"])
def test_a_text_without_a_share_and_a_factor_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"env.slow = {text}: give the share"):
        Latency("normal(10,5)", text)


def test_slow_episodes_need_a_latency() -> None:
    with pytest.raises(ConfigError, match="no effect without env.latency"):
        Latency("", "0.01x10")


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty"), ("1\nsoon\n", "seconds:2 is 'soon'"), ("1\n\n2", ":2 is ''"), ("-1", ":1 is '-1'")]
    + [("NaN", "is 'NaN'"), ('{"second": 1}', "not a number of seconds"), ("[1]", "not a number"), ("1e999", ":1 is")],
)
def test_a_file_without_seconds_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "seconds"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        Latency(f"recorded {file}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone \("):
        Latency(f"recorded {tmp_path / 'gone'}")
