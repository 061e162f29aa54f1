"""Built-in environments, and players of them that need no model. One problem in five is held out, as of tasks.py.

Each has three players: `random`; `expert`, the best without luck; `teacher`, whose transcripts, with slips, are for a
warm start: it knows how to play, and leaves something to learn.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from core import Environment, Reply, Turns
from tasks import TASKS

# (row, texts that it was given, actions that it took, rng) -> its next action
Player = Callable[[dict, Sequence[str], Sequence[str], Random], str]


@dataclass(frozen=True)
class Game:
    environment: Environment
    numbers: Callable[[], list[int]]  # all problems
    row: Callable[[int], dict]  # the data row of a problem
    players: dict[str, Player]
    slip: Callable[[str, Random, float], str]  # changes an action: each step goes wrong with a probability

    def sloppy(self, probability: float) -> Player:
        """Return the teacher with slips."""
        teacher = self.players["teacher"]
        return lambda row, texts, actions, rng: self.slip(teacher(row, texts, actions, rng), rng, probability)


# ---- guess: find a number of two digits in seven turns -----------------------------------------------------------


def guess(row: dict, seed: int) -> Turns:
    """Reply "<" to a guess that is too small and ">" to one that is too large."""
    text = ""
    for _ in range(7):
        action = yield text
        if action == row["answer"]:
            return 1.0
        text = "<" if action < row["answer"] else ">"
    return 0.0


def _open_range(texts: Sequence[str], actions: Sequence[str]) -> tuple[int, int]:
    """Return the least and the largest number that the replies allow."""
    replies = list(zip(map(int, actions), texts[1:]))
    return (
        max((number + 1 for number, reply in replies if reply == "<"), default=0),
        min((number - 1 for number, reply in replies if reply == ">"), default=99),
    )


def _bisect(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return f"{sum(_open_range(texts, actions)) // 2:02d}"


def _guess_in_range(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return f"{rng.randint(*_open_range(texts, actions)):02d}"


# ---- relay: the hailstone task by a tool, one call for each step -------------------------------------------------

CALL = re.compile(r"(3n\+1|n/2) of (\d{5})")


def relay(row: dict, seed: int) -> Turns:
    """Compute "3n+1 of 26617" or "n/2 of ...", digits reversed as in tasks.py, until a result is below the start.

    Other turns get "?", the third in a row ends the episode. 1 for the right last result.
    """
    text, unread = "", 0
    while unread < 3:
        action = yield text
        text = _computed(action)
        unread = unread + 1 if text == "?" else 0
        if not unread and int(text[::-1]) < int(row["prompt"][4::-1]):
            return float(text == row["answer"])
    return 0.0


def _computed(action: str) -> str:
    """Return the five digits of the result; "?" if the call cannot be read, or the result has more."""
    if not (call := CALL.fullmatch(action)):
        return "?"
    number = int(call[2][::-1])
    result = 3 * number + 1 if call[1] == "3n+1" else number // 2
    return f"{result:05d}"[::-1] if result < 10**5 else "?"


def _relay_row(n: int) -> dict:
    return {"prompt": TASKS["hailstone"].prompt(n), "answer": TASKS["hailstone"].answer(n)}


def _number_of(row: dict, texts: Sequence[str]) -> str:
    """Return the latest result, or the start."""
    return next((text for text in reversed(texts) if text.isdigit()), row["prompt"][:5])


def _call_by_parity(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    number = _number_of(row, texts)
    return f"{'3n+1' if int(number[0]) % 2 else 'n/2'} of {number}"


def _call_anything(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return f"{rng.choice(('3n+1', 'n/2'))} of {rng.randrange(10**5):05d}"


def _slip_in_call(action: str, rng: Random, probability: float) -> str:
    """Take the other operation with `probability`, and change each digit of the number with it."""
    operation, _, number = action.partition(" of ")
    if rng.random() < probability:
        operation = "n/2" if operation == "3n+1" else "3n+1"
    return f"{operation} of {TASKS['hailstone'].slip(number, rng, probability)}"


# ---- lake: cross a frozen lake of 4 x 4 places around its holes, in twelve moves ---------------------------------

SIDE, GOAL = 4, 15
MOVES = {"l": (0, -1), "r": (0, 1), "u": (-1, 0), "d": (1, 0)}


def lake(row: dict, seed: int) -> Turns:
    """Show the map, then the row and column after each move l, r, u or d, from the top left to the bottom right."""
    place, text = 0, row["map"]
    for _ in range(12):
        action = yield text
        place = _moved(place, action)
        if row["map"][place] == "O":
            return 0.0
        if place == GOAL:
            return 1.0
        text = f"{place // SIDE}{place % SIDE}"
    return 0.0


def _moved(place: int, move: str) -> int:
    down, right = MOVES.get(move, (0, 0))
    row, column = place // SIDE + down, place % SIDE + right
    return row * SIDE + column if 0 <= row < SIDE and 0 <= column < SIDE else place


def _moves_left(map: str) -> dict[int, int]:
    """Return the number of moves to the goal from each place that has a way there."""
    left, reached = {GOAL: 0}, [GOAL]
    for place in reached:  # grows
        for near in (_moved(place, move) for move in MOVES):
            if map[near] == "." and near not in left:
                left[near] = left[place] + 1
                reached.append(near)
    return left


def _lake_row(number: int) -> dict:
    map = "." + "".join("O" if number >> place & 1 else "." for place in range(GOAL - 1)) + "."
    return {"prompt": "lake", "answer": "", "map": map}


def _lake_numbers() -> list[int]:
    """Maps with two to four holes, a bit each, that can be crossed in twelve moves."""
    numbers = [sum(1 << hole for hole in holes) for k in (2, 3, 4) for holes in combinations(range(GOAL - 1), k)]
    return sorted(n for n in numbers if _moves_left(_lake_row(n)["map"]).get(0, GOAL) <= 12)


def _place(texts: Sequence[str]) -> int:
    return int(texts[-1], SIDE) if len(texts) > 1 else 0  # row and column are its digits to the base of SIDE


def _shortest_way(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    left = _moves_left(row["map"])
    return min(MOVES, key=lambda move: left.get(_moved(_place(texts), move), GOAL))


def _right_or_down(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    """Go towards the goal, or away from it where holes leave no other way."""
    place = _place(texts)
    free = [move for move in MOVES if row["map"][_moved(place, move)] == "." and _moved(place, move) != place]
    return rng.choice([move for move in free if move in "rd"] or free)


def _any_move(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return rng.choice([*MOVES])


# ---- bandit: twelve pulls at four arms, a reward in every turn ---------------------------------------------------

ARMS, PULLS = "0123", 12


def bandit(row: dict, seed: int) -> Turns:
    """Reply 1 or 0 to the pull of an arm; each 1 is a twelfth of the reward."""
    rng, text, reward = Random(f"{row['chances']} {seed}"), "", 0.0
    for _ in range(PULLS):
        action = yield Reply(text, reward)
        won = rng.random() < row["chances"].get(action, 0.0)
        text, reward = str(int(won)), won / PULLS
    return reward


def _bandit_row(number: int) -> dict:
    rng = Random(number)
    chances = {arm: rng.random() for arm in ARMS}
    return {"prompt": "bandit", "answer": max(ARMS, key=chances.__getitem__), "chances": chances}


def _best_so_far(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    """Try each arm once, then pull the one that has won most often."""
    if len(actions) < len(ARMS):
        return ARMS[len(actions)]
    won = {arm: [int(text) for action, text in zip(actions, texts[1:]) if action == arm] for arm in ARMS}
    return max(ARMS, key=lambda arm: sum(won[arm]) / len(won[arm]))


def _any_arm(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    return rng.choice(ARMS)


def _stay_at_times(row: dict, texts: Sequence[str], actions: Sequence[str], rng: Random) -> str:
    """Pull any arm, but every other time that an arm has won, the same again: a habit that training can strengthen."""
    return actions[-1] if texts[-1] == "1" and rng.random() < 0.5 else rng.choice(ARMS)


def _instead(choices: Sequence[str]) -> Callable[[str, Random, float], str]:
    """Return a slip: with `probability` any of `choices` takes the action's place."""
    return lambda action, rng, probability: rng.choice(choices) if rng.random() < probability else action


ENVIRONMENTS: dict[str, Game] = {
    "guess": Game(
        environment=guess,
        # Ten problems have the same answer: a number that training never asks for would, rightly, never be guessed.
        numbers=lambda: list(range(1000)),
        row=lambda n: {"prompt": "guess", "answer": f"{n % 100:02d}"},
        players={
            "random": lambda row, texts, actions, rng: f"{rng.randrange(100):02d}",
            "expert": _bisect,
            "teacher": _guess_in_range,
        },
        slip=TASKS["hailstone"].slip,
    ),
    "relay": Game(
        environment=relay,
        numbers=TASKS["hailstone"].numbers,
        row=_relay_row,
        players={"random": _call_anything, "expert": _call_by_parity, "teacher": _call_by_parity},
        slip=_slip_in_call,
    ),
    "lake": Game(
        environment=lake,
        numbers=_lake_numbers,
        row=_lake_row,
        players={"random": _any_move, "expert": _shortest_way, "teacher": _right_or_down},
        slip=_instead([*MOVES]),
    ),
    "bandit": Game(
        environment=bandit,
        numbers=lambda: list(range(1000)),
        row=_bandit_row,
        players={"random": _any_arm, "expert": _best_so_far, "teacher": _stay_at_times},
        slip=_instead(ARMS),
    ),
}
