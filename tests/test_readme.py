"""What README and docs/ promise a stranger: blocks run, and keys, files, names and links are there."""

import ast
import functools
import importlib.util
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT
from test_layout import FOLDERS, PACKAGE, ROOMS, SCRIPTS

from config import flatten
from mux import GroupFile
from serve import ServeFile
from settings import Config
from simulate import SimulationConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
PAGES = {path: path.read_text(encoding="utf-8") for path in PATHS}
TEXT = "\n".join(PAGES.values())
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("benchmarks/results/*.md"))]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run(tiny_folder, tmp_path, monkeypatch) -> None:
    (tmp_path / "runs" / "rollflash" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "rollflash" / "checkpoints" / "step_000100").symlink_to(tiny_folder)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_keys_and_files_that_it_names_are_there() -> None:
    known = flatten(Config()).keys() | flatten(SimulationConfig()).keys() | flatten(GroupFile()).keys()
    known |= flatten(ServeFile()).keys()
    sections = {field.name for file in (Config, SimulationConfig, ServeFile) for field in fields(file)} - {"round"}
    named = set(re.findall(r"(?:--|[`(])([a-z_]+\.[a-z_]+)(?=[=` ])", TEXT))
    keys = {key for key in named if key.partition(".")[0] in sections and not key.endswith((".py", ".json"))}
    keys = {key for key in keys if key in known or key.partition(".")[2] not in names_in(key.partition(".")[0])}
    assert len(keys) > 30 and keys - known == {"judge.verdict_mass"}, keys - known  # this one is of a record
    folders = "|".join(("configs", "figures", "benchmarks", "examples", "tests", "docs", *FOLDERS))
    files = set(re.findall(rf"(?:[`(]|python |bash )((?:{folders})/[\w/]+\.\w+|\w+\.py)\b", TEXT))
    missing = {name for name in files if not (ROOT / name).exists()}
    assert len(files) > 60 and missing <= {"my_rewards.py"}, missing


def test_make_knows_the_commands_and_installs_what_they_need() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^([a-z-]+): \$\(VENV\)/(\S+)$", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`|1 )make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"train", "test", "lint", "notebook", "figures", "results"} <= named <= rules.keys()
    assert {rule for rule, mark in rules.items() if mark == "ready-dev"} == {"test", "test-fast", "test-all", "lint"}
    assert set(rules.values()) == {"ready", "ready-dev"} and rules["train"] == "ready"


def test_the_sbatch_scripts_can_be_read() -> None:
    scripts = re.findall(r"^```\n(#!/bin/bash\n.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert scripts


# ---- the shape of the pages ----------------------------------------------------------------------------------------


def test_the_readme_is_short_and_begins_with_what_a_stranger_needs() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200 and len(README.split()) <= 1600
    first = "\n".join(lines[:40])
    assert (
        "make train" in first and "make test" in first and "No CUDA run yet" in first and "Not supported yet" in first
    )


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    text = re.sub(r"<!-- .*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: {sorted(anchors(target))}"


def test_every_page_is_linked_from_the_readme() -> None:
    assert all(f"docs/{path.name})" in README for path in PAGES if path.parent != ROOT)


@functools.cache
def names_in(room: str) -> set[str]:
    """Return what a file defines: `name` at the top, `Class.name` for methods and annotated fields."""
    found: set[str] = set()
    path = ROOT / f"{room.replace('.', '/')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if name := getattr(node, "name", ""):
            found |= {name} | {f"{name}.{inner.name}" for inner in getattr(node, "body", ()) if hasattr(inner, "name")}
    return found


def test_names_of_code_in_the_docs_are_there() -> None:
    """`room.name` and `room.Class.method` in backticks are settings or definitions."""
    keys = flatten(Config()).keys() | flatten(SimulationConfig()).keys() | flatten(GroupFile()).keys()
    keys |= flatten(ServeFile()).keys()
    folders = "|".join(FOLDERS)
    named = set(re.findall(rf"`((?:(?:{folders})\.)?[a-z_]+)\.([A-Za-z_]+(?:\.[a-z_]+)?)`", TEXT))
    named = {(room, name) for room, name in named if names_in(room) and name not in ("py", "toml", "jsonl")}
    wrong = {f"{room}.{name}" for room, name in named if f"{room}.{name}" not in keys and name not in names_in(room)}
    assert len(named) > 40 and wrong <= {"judge.verdict_mass"}, wrong


def test_every_file_and_folder_is_in_the_layout_tables() -> None:
    """The README has the files of the top level and the folders, architecture.md every file of both."""
    top, folders = (
        {path.name for path in ROOT.glob("*.py")},
        {f"{folder}/" for folder in (*FOLDERS, *SCRIPTS, PACKAGE, "tests")},
    )
    rooms = {str(path.relative_to(ROOT)) for path in ROOMS.values() if path.name != "__init__.py"}
    for page, names in {"README.md": top | folders, "docs/architecture.md": rooms}.items():
        rows = "\n".join(line for line in PAGES[ROOT / page].splitlines() if line.startswith("| `"))
        assert not [name for name in sorted(names) if f"`{name}`" not in rows], page


def test_the_reference_is_current() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert module.text() == page, "run `python docs/reference.py`"
