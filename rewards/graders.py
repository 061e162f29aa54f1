"""The graders: plain functions of (response, answer, row). A new grader is a function and an entry of GRADERS."""

import asyncio
import inspect
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable

from config import ConfigError
from core import Prompt, Reward
from reward import LARGEST_REWARD, LARGEST_WEIGHT, RewardConfig, by_grader, reward_number
from rewards import remote, sandbox, user_files

# (response, answer, every field of the data row) -> a number, several by name, which are added up, or a Reward
Grader = Callable[[str, str, dict], float | dict[str, float] | Reward]


def exact_match(response: str, answer: str, row: dict) -> float:
    """1 if the response is the answer; whitespace around them does not count."""
    return float(response.strip() == answer.strip())


def hailstone(response: str, answer: str, row: dict) -> float:
    """1 if the response is `steps = answer`, with exactly one `=`."""
    return _ends_in(answer, response, "=")


def reverse_add(response: str, answer: str, row: dict) -> float:
    """1 if the response is `steps # answer`, with exactly one `#`."""
    return _ends_in(answer, response, "#")


def _ends_in(answer: str, response: str, marker: str) -> float:
    steps, *guesses = response.split(marker)
    return float([guess.strip() for guess in guesses] == [answer.strip()])


def math_answer(response: str, answer: str, row: dict) -> float:
    """1 if the response's \\boxed{} equals `answer`, bare LaTeX; without a box its last formula or number is compared.

    Raises ValueError if nothing can be read from `answer`.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # half a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # each worker would warn that the alarm is off
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list:
        # A box that cannot be read is a wrong answer: no other formula of the text replaces it.
        mode = "first_match" if "\\boxed" in text else "any_match"
        return parse(text, targets, extraction_mode=mode, parsing_timeout=None)

    # Boxed like the response, so that both are read alike: from $2^{\aleph_0}$ it would take the 2.
    gold = read(f"\\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"math-verify reads nothing from the answer {answer!r}")
    return float(verify(gold, read(response), timeout_seconds=None))


def code(response: str, answer: str, row: dict) -> Reward:
    """1 if the response's program passes every test case of `answer` in the sandbox (rewards/sandbox.py), else 0.

    The program is the last fenced block, or without one the whole response, put into the row's `template` at
    {program}. Cases run in order until one fails. Raises ValueError if `answer` is not a list of cases.
    """
    cases = sandbox.read_cases(answer)
    blocks = re.findall(r"```[^\n]*\n(.*?)```", response, re.DOTALL)
    program = row.get("template", "{program}").replace("{program}", blocks[-1] if blocks else response)
    ran = []
    for case, seconds in zip(cases, row.get("case_seconds") or [RewardConfig.case_max_seconds] * len(cases)):
        outcome = sandbox.run(program, case, sandbox.Limits(seconds=seconds))
        ran.append((outcome.seconds, outcome.passed, outcome.timed_out))
        if not outcome.passed:
            return Reward(0.0, cases=tuple(ran))
    return Reward(1.0, cases=tuple(ran))


def env(response: str, answer: str, row: dict) -> Reward:
    """The sum of what the environment has given. (envs/episodes.py)"""
    earned = row.get("turn_rewards", [])  # none while graders are tried, before any episode
    return Reward(sum(earned), turns=tuple(earned))


GRADERS: dict[str, Grader] = {
    "match": exact_match,
    "hailstone": hailstone,
    "reverse_add": reverse_add,
    "math": math_answer,
    "code": code,
    "env": env,
}
INLINE = {"env", "match", "hailstone", "reverse_add"}  # called in the trainer's process; all others may hang or crash
WARM_UP: dict[str, Callable[[], object]] = {  # called once by each worker, so that no sample pays for imports
    "math": lambda: math_answer("\\boxed{1}", "1", {}),
    "code": sandbox.isolation,
}
TASK_OF_JUDGE = "judge"  # rows that name it are graded by a language model (rewards/judge.py)


def resolve_grader(name: str) -> Grader:
    """Return the table's grader or a user's: `package.module:function` or `path/to/file.py:function`.

    Modules and paths start from the working directory. For workers: it enters the grader's folder (user_files.py).
    Raises ConfigError if the name leads to no function.
    """
    check_grader(name)
    if name in GRADERS:
        user_files.enter("")
        return GRADERS[name]
    return user_files.load_function("grader", name, "(response, answer, row)")


def check_grader(name: str) -> None:
    """Raise ConfigError if `name` cannot be a grader. Imports nothing."""
    if remote.is_address(name):
        remote.check_address("grader", name)
    elif name not in GRADERS:
        user_files.check_name("grader", name, GRADERS, ", or the http address of a service")


def check_rewards(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raise ConfigError on settings that do not fit together and on rows that their graders cannot use."""
    if config.case_min_seconds > config.case_max_seconds:
        raise ConfigError(
            f"reward.case_min_seconds = {config.case_min_seconds:g} is over reward.case_max_seconds = "
            f"{config.case_max_seconds:g}; lower it"
        )
    also = by_grader("reward.also", config.also).keys()
    for name in also - {TASK_OF_JUDGE}:
        check_grader(name)
    tasks = {prompt.task for prompt in prompts}
    for key, least, most, known in (
        ("also", -LARGEST_REWARD, LARGEST_REWARD, also),
        ("concurrency", 1, math.inf, tasks | also),
        ("weights", 0, LARGEST_WEIGHT, tasks),
    ):
        for name, number in by_grader(f"reward.{key}", getattr(config, key)).items():
            if name not in known:
                raise ConfigError(f"reward.{key} names {name!r}; the graders here are {', '.join(sorted(known))}")
            if number != (nearest := min(max(number, least), most)):
                bound = "least" if number < nearest else "most"
                raise ConfigError(f"reward.{key}: {name} = {number:g} must be at {bound} {nearest:g}")
    for prompt in prompts:
        _check_row(prompt, {prompt.task, *also})


def _check_row(prompt: Prompt, graders: set[str]) -> None:
    if "math" in graders and not prompt.answer.strip():
        raise ConfigError(f"{prompt.where}: the answer is empty; the grader math has nothing to compare with")
    if "code" in graders:
        template = prompt.extra.get("template", "{program}")
        if not isinstance(template, str) or "{program}" not in template:
            raise ConfigError(
                f"{prompt.where}: template = {repr(template)[:60]} must be text with {{program}} where the program "
                "goes; correct it, or leave it out"
            )
        try:
            sandbox.read_cases(prompt.answer)
        except ValueError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None


def grade(grader: Grader, response: str, answer: str, row: dict) -> Reward:
    """Call the grader. An exception, or a result that cannot be trained on, becomes a Reward of 0 with an error."""
    value, error, start = 0.0, "", time.perf_counter()
    parts: dict[str, float] = {}
    cases: tuple[tuple[float, bool, bool], ...] = ()
    turns: tuple[float, ...] = ()
    try:
        result: object = grader(response, answer, row)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        if isinstance(result, Reward):
            cases, turns = result.cases if grader is code else (), result.turns if grader is env else ()
            error, result = str(result.error), result.value
        named = result if isinstance(result, dict) else {"": result}
        numbers = {str(name): reward_number(value) for name, value in named.items()}
        known = {name: number for name, number in numbers.items() if number is not None}
        number = reward_number(sum(known.values())) if known and len(known) == len(numbers) else None
        if number is None:
            error = f"the grader returned {repr(result)[:200]}, not a finite number of at most {LARGEST_REWARD:g}"
        elif not error:
            value, parts = number, known if isinstance(result, dict) else {}
    except KeyboardInterrupt:  # a user's, where graders run in the trainer's process
        raise
    except BaseException as raised:  # also of asyncio and of testing tools, which are no Exception
        error = user_files.said(raised)
    return Reward(value, time.perf_counter() - start, error[:500], cases, parts, turns)


async def _wait_for(result: Awaitable[object]) -> object:
    return await result
