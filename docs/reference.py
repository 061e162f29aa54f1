"""Writes docs/reference.md, every setting with default, meaning and limits: `python docs/reference.py`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import toml_text
from mux import MuxConfig
from serve import ServeConfig
from settings import FREE_TO_CHANGE, Config
from simulate import SimulationConfig

HEAD = """# Reference: every setting

Made from the code by `python docs/reference.py`; `tests/test_readme.py` fails when it is not current.

`train.py` and `profiler.py` take a TOML file (`--config FILE.toml`) and any key as `--section.key=value`, which
wins over the file.
A wrong key, type or value is refused before work starts, in one line that names the limit and a remedy.

`--resume` refuses settings that would change the trajectory of a run. It accepts other values of: {free} (another
`run.steps` changes the last batches of a rollout that runs ahead); and of all of `log`, `planner`, `stream`, `group`
and `drafts`. `run.steps` must stay where the learning rate follows a schedule, `run.eval_every` and
`run.checkpoint_every` with `overlap.flight = keep`. `distill.teacher` may name another folder with the same weights.

Sections: {sections}
"""
SIMULATOR = """## The simulator

[`simulate.py`](simulator.md) takes the sections {shared} of above, and these of its own.
"""

GROUP = """## A group of jobs

[`mux.py`](mux.md) takes these, and each of its jobs the sections above.
"""
SERVER = """## A server

[`serve.py`](serving.md) takes `rollout` and `sampling` of above, with 2048 tokens each for prompt and response, and
these.
"""


def limits(of: Any) -> str:
    """Return the limits of an option in words."""
    words = {"min": "at least", "above": "more than", "max": "at most"}
    bounds = [f"{word} {f'{of[name]:,}'.removesuffix('.0')}" for name, word in words.items() if of[name] is not None]
    bounds += ["or `auto`"] * of["auto"]
    return ", ".join(bounds) or ", ".join(f"`{choice}`" for choice in of["choices"] or ())


def table(section: str, config: Any) -> str:
    made = f"`{type(config).__name__}` in `{type(config).__module__.replace('.', '/')}.py`."
    rows = [made, "", "| key | default | meaning | limits |", "|---|---|---|---|"]
    inner = [
        field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, field.name))
    ]
    for field in (field for field in dataclasses.fields(config) if field.name not in inner):
        help = field.metadata["help"].replace("<", "&lt;")
        cells = f"`{section}.{field.name}`", f"`{toml_text(getattr(config, field.name))}`", help, limits(field.metadata)
        rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    rows += ["", *(table(f"{section}.{name}", getattr(config, name)) for name in inner)] if inner else []
    return "\n".join(rows)


def text() -> str:
    """Return the whole page."""
    run, simulation = Config(), SimulationConfig()
    own = [field.name for field in dataclasses.fields(run)]
    simulated = [field.name for field in dataclasses.fields(simulation)]
    shared = [name for name in simulated if type(getattr(run, name, None)) is type(getattr(simulation, name))]
    more = [name for name in simulated if name not in shared]
    sections = " · ".join(f"[{name}](#{name})" for name in (*own, *(name for name in more if name not in own)))
    parts = [HEAD.format(free=", ".join(f"`{key}`" for key in FREE_TO_CHANGE), sections=sections)]
    parts += [f"## {name}\n\n{table(name, getattr(run, name))}\n" for name in own]
    parts.append(SIMULATOR.format(shared=", ".join(f"`{name}`" for name in shared)))
    parts += [f"### {name}\n\n{table(name, getattr(simulation, name))}\n" for name in more]
    parts += [f"{GROUP}\n{table('mux', MuxConfig())}\n", f"{SERVER}\n{table('serve', ServeConfig())}\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "reference.md").write_text(text(), encoding="utf-8")
