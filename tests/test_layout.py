"""The house stands as designed: imports point one way, policies and graders know no torch, functions stay small."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest
import torch

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "envs", "overlap", "policies", "process", "rewards", "server", "simulation", "weights")
ROOMS = {path.stem: path for path in ROOT.glob("*.py")}  # by the name that imports give them
ROOMS |= {f"{folder}.{path.stem}": path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")}
SCRIPTS = ("benchmarks", "docs", "examples", "figures")
PACKAGE = "plainroll"  # gives rooms names that clash with none, for other programs; no room imports it
FILES = [*ROOMS.values(), *ROOT.glob("benchmarks/peers/*.py"), *ROOT.glob(f"{PACKAGE}/*.py")]
FILES += [path for folder in (*SCRIPTS, "tests") for path in ROOT.glob(f"{folder}/*.py")]
OPTIONAL = {
    "wandb",
    "datasets",
    "pyarrow",
    "liger_kernel",
    "openvino",
    "openvino_genai",
    "vllm",
    "openai",
}  # imported when they are asked for, as is TRL, which a benchmark is named like
NO_TORCH = ["scheduler", "tasks", "reward", "config", "core", "buffer", "engine.pages", "engine.batcher", "simulate"]
NO_TORCH += ["engine.drafts", "data", "environments", "process.serving", "process.workers", "process.permits"]
NO_TORCH += ["process.group_jobs", "process.group_server", "process.group_timeline"]
NO_TORCH += [room for room in ROOMS if room.startswith(("envs.", "policies.", "simulation."))]
NO_TORCH += [
    room
    for room in ROOMS
    if room.startswith("rewards.") and room not in ("rewards.judge", "rewards.offload", "rewards.teacher")
]
NO_TORCH = [room for room in NO_TORCH if not room.endswith(".worker")]  # scripts
LIMITS = {ast.ClassDef: 300, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}  # lines; a function fits a screen
LONGER = {  # and why
    "trl.trl_worker": "runs where nothing of ours can be imported, so it is one function",
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, inside: bool = True) -> set[str]:
    """Return the rooms and packages that a file imports: with `inside` functions too, else at its top."""
    names, tree = set(), parsed(path)
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner if node.module in FOLDERS else {node.module}
    return {name if name in ROOMS else name.partition(".")[0] for name in names}


def reachable(room: str) -> set[str]:
    """Return everything that a room imports, and that our rooms among it import, and so on."""
    seen: set[str] = set()
    todo = {room}
    while todo:
        name = todo.pop()
        seen.add(name)
        if name in ROOMS:
            todo |= imports(ROOMS[name]) - seen
    return seen - {room}


def test_the_rooms_of_the_design_are_here() -> None:
    expected = {"attention", "checkpoint", "config", "core", "data", "loss", "metrics", "model", "parallel", "reward"}
    expected |= {"rollout", "sampling", "scheduler", "tasks", "train", "trainer", "warm_start", "job", "records"}
    assert expected <= ROOMS.keys()


@pytest.mark.slow
def test_imports_between_rooms_make_no_circle() -> None:
    graph = {name: imports(path) & ROOMS.keys() for name, path in ROOMS.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError and names the circle
    assert len(order) == len(ROOMS) and graph["train"] and not graph["core"] and not graph["config"]


def test_nothing_imports_the_step_loop_and_no_room_imports_a_test() -> None:
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}
    for name, path in ROOMS.items():
        assert not imports(path) & {"train", "pytest", PACKAGE, *tests}, name


def test_low_rooms_do_not_import_high_ones() -> None:
    low = {"config", "core", "scheduler", "tasks", "loss", "sampling", "attention", "parallel", "model", "reward"}
    high = {"rollout", "trainer", "checkpoint", "warm_start", "train"}
    assert {name: reachable(name) & high for name in low} == {name: set() for name in low}
    assert "trainer" not in reachable("rollout") and "rollout" not in reachable("trainer")


def test_rooms_take_the_settings_that_they_use_and_only_the_top_knows_them_all() -> None:
    assert {name for name, path in ROOMS.items() if "settings" in imports(path)} == {
        "process.evaluate",
        "job",
        "mux",
        "profiler",
        "serve",
        "train",
    }
    for room in ("rollout", "rounds", "learning", "overlap.streamed", "trainer", "process.ending"):
        assert "settings" not in reachable(room), room
    assert not reachable("rounds") & {
        "trainer",
        "rewards.judge",
        "warm_start",
        "learning",
        "buffer",
        "overlap.streamed",
    }


def test_no_room_decides_by_the_seconds_of_the_records() -> None:
    for name, path in ROOMS.items():
        assert "clock.seconds" not in path.read_text(encoding="utf-8"), f"{name}: measure what the decision needs"


def test_every_command_line_ends_in_one_way() -> None:
    """So a reader of its output that ends early, as `head` does, leaves no traceback."""
    own = {name for name, path in ROOMS.items() if "sys.exit(main(" in path.read_text(encoding="utf-8")}
    assert not own, "take process.command.run"


@pytest.mark.parametrize("room", NO_TORCH)
def test_no_torch_by_any_path(room: str) -> None:
    assert not reachable(room) & {"torch", "transformers", "safetensors"}


@pytest.mark.slow
def test_no_torch_when_they_are_really_imported() -> None:
    code = f"import sys, {', '.join(NO_TORCH)}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_file_shadows_the_standard_library() -> None:
    top = {*ROOMS, *FOLDERS}
    assert not top & sys.stdlib_module_names
    assert not {path.stem for path in (ROOT / "tests").glob("*.py")} & (sys.stdlib_module_names | top)


def test_no_script_hides_a_folder() -> None:
    """Python takes a script that it finds anywhere on the path before a folder without `__init__.py`."""
    scripts = {path.stem for folder in ("benchmarks", "figures") for path in (ROOT / folder).glob("*.py")}
    assert all((ROOT / folder / "__init__.py").exists() for folder in scripts.intersection(FOLDERS))


@pytest.mark.slow
def test_every_file_says_its_job() -> None:
    for path in FILES:
        docstring = ast.get_docstring(parsed(path))
        assert docstring and len(docstring.splitlines()[0]) > 20, path


def listed(file: str) -> set[str]:
    """Return the packages of a requirements file by the names that imports give them."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return {re.split("[=<>; ]", line)[0].replace("-", "_") for line in lines if line and line[0] not in "#-"}


@pytest.mark.slow
def test_every_imported_package_is_listed() -> None:
    """What is used in requirements.txt, all of it and no more; what only tests need in requirements-dev.txt."""
    ours = {*sys.stdlib_module_names, *FOLDERS, *SCRIPTS, *ROOMS, PACKAGE, *(path.stem for path in FILES)}
    tests = {path for path in FILES if path.parent == ROOT / "tests"}
    used, tested = (set().union(*map(imports, files)) - ours for files in ({*FILES} - tests, tests))
    assert used - OPTIONAL == listed("requirements.txt")
    assert tested <= listed("requirements.txt") | listed("requirements-dev.txt")
    at_the_top = set().union(*(imports(path, inside=False) for path in {*FILES} - tests))
    assert OPTIONAL <= used and not OPTIONAL & at_the_top, "import what is optional inside a function"


def longer(node: ast.AST, name: str) -> list[str]:
    """Return the functions and classes in `node` that are over their limit."""
    found = []
    for child in ast.iter_child_nodes(node):
        own = name
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = f"{name}.{child.name}"
            found += [own] if (child.end_lineno or 0) - child.lineno + 1 > LIMITS[type(child)] else []
        found += longer(child, own)
    return found


@pytest.mark.slow
def test_functions_and_classes_fit_their_size() -> None:
    found = [name for path in FILES for name in longer(parsed(path), path.stem)]
    assert set(found) == set(LONGER), "split what is too long; take from LONGER what no longer is"


def test_the_top_level_stays_short() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 28, "what a paper is not about belongs into a folder"


def test_the_step_loop_stays_a_page() -> None:
    assert len(ROOMS["train"].read_text(encoding="utf-8").splitlines()) <= 150


def test_few_values_have_no_type() -> None:
    trees = [parsed(path) for path in ROOMS.values()]
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees for node in ast.walk(tree))
    assert uses < 40, "name a type, a Protocol or a TypeVar instead of Any"


def test_no_bare_except() -> None:
    for path in ROOMS.values():
        for node in ast.walk(parsed(path)):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path.name}:{node.lineno}"


def test_every_collective_is_one_of_a_world() -> None:
    """Only `parallel` calls torch's collectives and makes groups: in the default group a part would wait for all."""
    functions = {name: f for name, f in vars(torch.distributed).items() if type(f) is FunctionType}
    collectives = {name for name, f in functions.items() if "group" in inspect.signature(f).parameters}
    collectives -= {name for name in collectives if name.startswith(("get_", "destroy_"))}
    assert {"all_reduce", "broadcast_object_list", "send", "all_gather_into_tensor"} <= collectives
    for name, path in ROOMS.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                assert not {alias.name for alias in node.names} & {*collectives, "new_group"}, name
            if not isinstance(node, ast.Call):
                continue
            module, _, function = ast.unparse(node.func).rpartition(".")
            if module in ("dist", "torch.distributed"):
                assert name == "parallel" or function not in {*collectives, "new_group"}, f"{name}:{node.lineno}"
                named = {keyword.arg for keyword in node.keywords}
                assert function not in collectives or "group" in named, f"{name}:{node.lineno}"
