"""Environments made of other things: a class in the style of Gymnasium, functions that the model calls as tools.

Programs that the model wrote run in the sandbox of rewards/sandbox.py: `tools(python, answer=exact_match)`.
"""

import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Callable

from core import Environment, Reply, Turns
from rewards import sandbox
from rewards.graders import Grader, grade

OPENS, CLOSES = re.compile(r"<(\w+)>"), re.compile(r"</(\w+)>")
OF_MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
MAX_BAD = 3  # calls that fail in a row
SILENCE = "(no output)"  # an empty result
PROGRAM = sandbox.Limits(seconds=5.0, output_bytes=2**16)


def from_gym(make: Callable) -> Environment:
    """Return the environment of a class in the style of Gymnasium or GEM, whose observations and actions are text.

    `make()` has `reset(seed=...)`, which gets the data row as `options` if it takes them, and `step(action)`, which
    returns (observation, reward, terminated, truncated, info), or (observation, reward, done) with or without an info.
    The first observation follows the prompt. With a chat template it must be empty: write it into the row's prompt.
    """

    def environment(row: dict, seed: int) -> Turns:
        env = make()
        try:
            takes_row = "options" in inspect.signature(env.reset).parameters
            text = env.reset(seed=seed, options=row) if takes_row else env.reset(seed=seed)
            reply = Reply(text[0] if isinstance(text, tuple) else text)
            while True:
                text, reward, *ends = env.step((yield reply))
                if any(ends[:2] if len(ends) == 3 else ends[:1]):
                    return reward
                reply = Reply(text, reward)
        finally:
            getattr(env, "close", lambda: None)()

    return environment


def tools(*functions: Callable, answer: Grader | None = None) -> Environment:
    """Return an environment in which a turn calls a function, as <name>arguments</name>, and reads the result.

    The arguments are the text of the only parameter, or JSON: a list, or an object of names; nothing for none. Chat
    models may call and read as they have learned to: <tool_call>{"name": .., "arguments": {..}}</tool_call>, and the
    result between <tool_response> and its end. The first call of a turn counts, behind its thinking. A call that
    fails gets its error as text; the third in a row ends the episode with a reward of 0. The prompt has to tell of
    the functions, as the environment's docstring does: it has their signatures and docstrings.

    A turn without a call is the answer, or what it has between <answer> and its end. `answer` grades it, as a grader
    does a response. It must not hang on what a model writes: that would fail the episode. Without it the reward is 0,
    and `reward.also` grades. Between other tags stands a call, and if no such function is there, a bad one.
    """
    by_name = {getattr(function, "__name__", ""): function for function in functions}
    if len(by_name) < len(functions) or not all(name.isidentifier() for name in by_name):
        raise ValueError(f"tools need functions with names of their own, not {[*by_name]}")

    def environment(row: dict, seed: int) -> Turns:
        text, bad = "", 0
        while bad < MAX_BAD:
            action = (yield text).rpartition("</think>")[2]
            found = calls_in(action)
            known = [call for call in found if call[0] in (*by_name, "tool_call")]
            final = [inner for name, inner in found if name == "answer"]
            call = known[0] if known else None if final or not found else found[0]
            if not call:
                if not answer:
                    break
                graded = grade(answer, final[-1] if final else action, row["answer"], row)
                if graded.error:
                    raise RuntimeError(graded.error)
                return graded.value
            try:
                text, bad = _result(by_name, *call) or SILENCE, 0
            except sandbox.SandboxError:
                raise  # the machine's fault: the model could not mend it
            except (Exception, SystemExit) as error:
                text, bad = f"{type(error).__name__}: {error}", bad + 1
            text = text.encode(errors="backslashreplace").decode()  # a model's JSON may spell half a character
            if call[0] == "tool_call":
                text = f"<tool_response>\n{text}\n</tool_response>"
        return 0.0

    calls = [f"<{name}>..</{name}>: {name}{inspect.signature(f)}: {inspect.getdoc(f)}" for name, f in by_name.items()]
    environment.__doc__ = "\n".join(calls)
    return environment


def calls_in(text: str) -> list[tuple[str, str]]:
    """Return each (name, inner) of <name>inner</name>, from left to right; in the inner text none is looked for.

    Takes time in proportion to the text, which a model may fill with tags that never close.
    """
    ends: dict[str, list[int]] = {}
    for match in CLOSES.finditer(text):
        ends.setdefault(match[1], []).append(match.start())
    found, past = [], 0
    for match in OPENS.finditer(text):
        own = ends.get(match[1], [])
        place = bisect_left(own, match.end())
        if match.start() >= past and place < len(own):
            found.append((match[1], text[match.end() : own[place]]))
            past = own[place] + len(f"</{match[1]}>")
    return found


def python(program: str) -> str:
    """Run a Python program, and read what it prints."""
    return run_program(program)


def run_program(program: str, stdin: str = "", limits: sandbox.Limits = PROGRAM) -> str:
    """Return what an untrusted Python program prints in the sandbox, and in a last line how it failed, if it did.

    `limits.seconds` must be well below `env.step_seconds`. Raises SandboxError where no sandbox can be made.
    """
    outcome, output = sandbox.execute(program, stdin, limits)
    return f"{output.decode(errors='replace').rstrip()}\n{outcome.cause}".strip("\n")


def _result(by_name: dict[str, Callable], name: str, text: str) -> str:
    """Return the result of a call. Raises an error that says how to call."""
    is_chat = name == "tool_call"
    if is_chat:
        call = json.loads(text)
        if not (isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call):
            raise ValueError('a call is {"name": .., "arguments": {..}}')
        name, values = call["name"], call["arguments"]
    if name not in by_name:
        raise NameError(f"there is no {name}, only {', '.join(by_name)}")
    signature = inspect.signature(by_name[name])
    try:
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        takes_text = len(kinds) == 1 and kinds[0] not in OF_MANY
        if not is_chat:
            values = [text] if takes_text else json.loads(text) if kinds or text.strip() else []
        if not isinstance(values, list | dict):
            raise TypeError("neither a list nor an object")
        bound = signature.bind(**values) if isinstance(values, dict) else signature.bind(*values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the arguments are not the JSON of {signature} ({error})") from None
    return str(by_name[name](*bound.args, **bound.kwargs))
