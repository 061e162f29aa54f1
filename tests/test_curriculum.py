"""The curriculum: prompts with equal rewards rest for ever more epochs, and no epoch is left without prompts."""

import json
from copy import copy
from random import Random

import pytest
from conftest import steps_of

import train
from core import Prompt
from data import Mixture, PromptCursor
from policies.curriculum import LONGEST, RESTING, Curriculum

PROMPTS = [Prompt(i, (i,), str(i), "", "match", source="ab"[i % 2]) for i in range(40)]


def test_a_prompt_rests_1_2_4_epochs_and_so_on_up_to_a_limit_until_its_rewards_differ():
    curriculum, visited, epoch = Curriculum(), [], 0
    while len(visited) < 9:
        if not curriculum.skips(epoch, 5, 0, 100):
            visited.append(epoch)
            curriculum.observe(epoch, 5, varies=False)
        epoch += 1
    rests = [b - a - 1 for a, b in zip(visited, visited[1:])]
    assert rests == [1, 2, 4, 8, 16, 16, 16, 16] and LONGEST == 16
    curriculum.observe(visited[-1], 5, varies=True)
    assert not curriculum.skips(visited[-1] + 1, 5, 0, 100)
    curriculum.observe(visited[-1], 5, varies=False)
    assert [curriculum.skips(visited[-1] + e, 5, 0, 100) for e in (1, 2)] == [True, False], "it begins anew"


def test_a_visit_that_waited_and_comes_late_shortens_no_rest():
    curriculum = Curriculum()
    for epoch in (7, 2):
        curriculum.observe(epoch, 1, varies=False)
    assert curriculum.skips(8, 1, 0, 100) and not curriculum.skips(9, 1, 0, 100)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_learnt_an_epoch_has_each_prompt_at_most_once_and_a_quarter_of_them_at_least(seed):
    rng = Random(seed)
    prompts = PROMPTS[: rng.randint(1, 40)]
    cursor, seen, late = PromptCursor(prompts, seed, Curriculum()), {}, []
    for _ in range(200):
        for visit in cursor.take(rng.randint(0, 5)):
            seen.setdefault(visit.epoch, []).append(visit.prompt.index)
            late.append(visit.id)
        rng.shuffle(late)
        ready, late = late[:4], late[4:]
        cursor.observe({id: rng.random() < 0.2 for id in ready})
    *whole, _ = sorted(seen)
    assert whole == list(range(len(whole))), "no epoch is left out"
    for epoch in whole:
        assert len(set(seen[epoch])) == len(seen[epoch]) >= len(prompts) - int(RESTING * len(prompts))


def test_prompts_that_teach_are_drawn_more_often_and_none_is_forgotten():
    cursor, counts = PromptCursor(PROMPTS, 3, Curriculum()), [0] * 40
    for _ in range(400):
        visits = cursor.take(4)
        for visit in visits:
            counts[visit.prompt.index] += 1
        cursor.observe({visit.id: visit.prompt.index < 10 for visit in visits})
    teach, rest = sum(counts[:10]) / 10, sum(counts[10:]) / 30
    assert teach > 2.5 * rest and min(counts) > 0, counts


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("stop", [0, 7, 50])
def test_a_saved_cursor_goes_on_with_the_same_prompts(mixed, stop):
    def make():
        if not mixed:
            return PromptCursor(PROMPTS, 2, Curriculum())
        lanes = [PromptCursor(PROMPTS[i::2], 2, Curriculum(), i) for i in (0, 1)]
        return Mixture(lanes, [1, 3], 2)

    def play(cursor, rounds: int) -> list:
        taken = []
        for _ in range(rounds):
            visits = cursor.take(5)
            taken += [visit.id for visit in visits]
            cursor.observe({visit.id: visit.prompt.index % 5 == 0 for visit in visits})
        return taken

    one = make()
    play(one, stop)
    saved = json.loads(json.dumps(one.state_dict()))
    ahead = [visit.id for visit in copy(one).take(30)]
    assert json.loads(json.dumps(one.state_dict())) == saved, "to look ahead changes nothing"
    other = make()
    play(other, 3)
    other.load_state_dict(saved)
    assert [visit.id for visit in copy(other).take(30)] == ahead
    assert play(other, 30) == play(one, 30)


@pytest.mark.parametrize(
    "mode", [{}, {"overlap__depth": 1, "loss__old_logprobs": "rollout", "scheduler__eta_prompts": 1}]
)
@pytest.mark.slow
def test_a_run_draws_other_prompts_and_goes_on_alike_after_a_kill(mode, settings, tmp_path):
    """Half of the prompts have one answer only: their rewards are equal."""
    rows = [{"prompt": f"{i}", "answer": "x"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hard.py").write_text(
        "def score(response, answer, row):\n    return float(len(response) % 2) if int(row['prompt']) % 2 else 0.0\n"
    )
    data = dict(data__train=tmp_path / "rows.jsonl", data__task=f"{tmp_path / 'hard.py'}:score", data__eval_prompts=0)
    options = mode | data | dict(run__steps=10, run__eval_every=0, run__checkpoint_every=5, run__dump_rollouts="true")

    def drawn(folder: str, first: int = 1) -> list[tuple[int, int]]:
        found = []
        for step in range(first, 11):
            lines = (tmp_path / folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
            found += [(row["epoch"], row["prompt"]["index"]) for row in map(json.loads, lines)]
        return found

    assert train.main(settings("off", **options)) == 0
    assert train.main(settings("on", **options, data__curriculum="pass_rate")) == 0
    plain, chosen = drawn("off"), drawn("on")
    assert sum(i % 2 for _, i in chosen) > sum(i % 2 for _, i in plain) + 4, (plain, chosen)
    assert len(set(chosen)) == len(chosen) == len(plain) == 40
    told = [record["round"]["curriculum"] for record in steps_of(tmp_path / "on")]
    assert max(t["resting"] for t in told) >= 3 and max(t["skipped"] for t in told) >= 1
    assert "curriculum" not in steps_of(tmp_path / "off")[0]["round"]
    if mode:
        return  # an endless rollout draws less ahead before its last step
    first = dict(options, run__steps=5)
    assert train.main(settings("cut", **first, data__curriculum="pass_rate")) == 0
    assert train.main([*settings("cut", **options, data__curriculum="pass_rate"), "--resume"]) == 0
    assert drawn("cut") == chosen
