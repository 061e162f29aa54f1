"""Fixtures that several rooms' tests share: tiny models, and processes that talk to each other."""

import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from groups import Group

import parallel
import train
from checkpoint import load_model
from config import load_config
from core import ModelShape
from engine import native
from metrics import read_records
from model import Model
from process import threads
from rollout import Engine
from settings import Config
from warm_start import WarmStartConfig, make_model

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)  # tests run side by side
threads.before_torch()  # ranks, too
mp.set_forkserver_preload(["preload"])
torch.set_flush_denormal(True)
thaw, gc.unfreeze = gc.unfreeze, lambda: None  # else every run looks at a million objects that were here before it
TINY = WarmStartConfig(steps=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256)
ALONE = parallel.World(0, 1, torch.device("cpu"))
thorough = partial(pytest.param, marks=pytest.mark.thorough)  # a parameter whose case others hold, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks as slow: `make test-fast` leaves it out."""
    for item in items:
        if "fork_server" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


class FusedEngine(Engine):
    """What an engine does on a GPU, with the kernels' torch twins and no graphs: shared pages, flags a step late."""

    @staticmethod
    def _is_fused(device: torch.device) -> bool:
        return True


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights and the byte tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(TINY, "hailstone", folder, ALONE)
    return folder


@pytest.fixture
def tiny_model(tiny_folder: Path) -> Model:
    return load_model(tiny_folder, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the process that ranks fork from. It finds what it preloads by its working directory only."""
    native.library()  # compiled here, or each of the first ranks would
    with contextlib.chdir(ROOT / "tests"):
        forkserver.ensure_running()


def _rank(rank: int, size: int, store: str, function, args) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    everyone = torch.distributed.group.WORLD
    shared = torch.distributed.FileStore(f"{store}.shared", size)
    world = parallel.World(rank, size, torch.device("cpu"), everyone, everyone, node_size=size, store=shared)
    function(world, *args)
    parallel.stop(world)


@pytest.fixture
def run_ranks(tmp_path: Path, fork_server):
    """Call the module-level `function(world, *args)` on `size` gloo ranks. A rank's exception fails the test."""

    stores = (tmp_path / f"store{i}" for i in count())  # the one before may still be there

    def run(size: int, function, *args) -> None:
        told = size, str(next(stores)), function, args
        ranks = mp.start_processes(_rank, told, nprocs=size, join=False, start_method="forkserver")
        while not ranks.join(grace_period=1.0):  # of a failed rank's peers: by default they get 30 seconds
            pass

    return run


def train_runs(world: parallel.World, *runs: list[str], resume: bool = False, file: str | None = None) -> None:
    """Train each run, a command line without `--ranks`, one after another on the same ranks. `file`: its --config."""
    for arguments in runs:
        config = load_config(Config, file, arguments)
        Path(config.run.dir).mkdir(exist_ok=True)
        train.train(config, world, resume)


class Ended(NamedTuple):
    """A rank's exit code, None if it lives on, and its output."""

    code: int | None
    out: str
    err: str


def _main(rank: int, size: int, port: int, folder: Path, main: Callable[..., int], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name in ("stdout", "stderr"):
        setattr(sys, name, open(folder / f"{name}{rank}", "w"))  # noqa: SIM115 - it stays open to the end
    code = main(*args)
    sys.stdout.flush()
    os._exit(code)


@pytest.fixture
def run_mains(tmp_path: Path, fork_server):
    """Call the module-level `main(*args)` on `size` ranks as torchrun would; return how each `awaited` one ended."""

    def run(size: int, main: Callable[..., int], *args, awaited: Iterable[int] = ()) -> list[Ended]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")
        ranks = [context.Process(target=_main, args=(rank, size, port, tmp_path, main, args)) for rank in range(size)]
        for process in ranks:
            process.start()
        for rank in awaited or range(size):
            ranks[rank].join(600)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        said = ([(tmp_path / f"{name}{rank}").read_text() for rank in range(size)] for name in ("stdout", "stderr"))
        return [Ended(*rank) for rank in zip(codes, *said, strict=True)]

    return run


@pytest.fixture
def alone(monkeypatch):
    """Let a test change what a launcher changes: the environment and the number of threads."""
    for name in ("RANK", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", *threads.GIVEN):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    count = torch.get_num_threads()
    yield monkeypatch
    torch.set_num_threads(count)


@pytest.fixture
def mixed_prompts(tmp_path: Path) -> Path:
    """Rows whose responses are short and long, mixed in each group, so that batches and updates end between them."""
    rows = [{"prompt": "count " + "up " * (i % 5) + str(i), "answer": str(i)} for i in range(48)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def group() -> Iterator[Group]:
    with TemporaryDirectory() as folder:  # a path of a Unix socket has at most 107 bytes
        made = Group(f"{folder}/server/socket")
        yield made
        made.stop()


@pytest.fixture
def settings(tiny_folder: Path, tmp_path: Path):
    """Return the command line of a small run in a folder of its own; keywords override, `a__b` for a.b."""

    def make(folder: str = "run", **overrides) -> list[str]:
        values = {
            "run__dir": tmp_path / folder,
            "run__device": "cpu",
            "model__path": tiny_folder,
            "data__eval_prompts": 4,
            "scheduler__num_prompts": 4,
            "scheduler__num_responses": 4,
            "rollout__max_prompt_tokens": 16,
            "rollout__max_response_tokens": 24,
            "rollout__kv_gib": 0.01,
            "trainer__lr": 1e-3,
            "reward__num_workers": 1,
            "reward__timeout_seconds": 60,  # a machine with more to do may hold a worker up for seconds
        }
        return [f"--{key.replace('__', '.')}={value}" for key, value in (values | overrides).items()]

    return make


def any_shape(vocabulary: int = 512, longest: int = 4096, experts: int = 0) -> ModelShape:
    """Return the shape of a model of two layers. `experts`: of a mixture, of which a token takes two."""
    told = {"num_experts": experts, "experts_per_token": 2 * bool(experts)}
    return ModelShape(vocabulary, 8, 8, 2, 1, 1, 8, longest, 1e-6, {}, True, False, False, False, False, **told)


def steps_of(folder: Path) -> list[dict]:
    return [record for record in read_records(folder / "steps.jsonl") if record["step"] > 0]


@pytest.fixture
def model(tiny_model: Model) -> Model:
    """Large weights: every token depends on the whole context."""
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return tiny_model
