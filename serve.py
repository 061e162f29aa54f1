"""Serve a model to OpenAI clients: `python serve.py models/FOLDER`, `python serve.py --serve.follow=runs/tiny`.

Our own engine behind an endpoint (server/). While it serves it takes new weights: those of a run that it follows, or
those of a folder that an authorised client names.
"""

import argparse
import ipaddress
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from process.threads import before_torch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback until a handler is set
    before_torch()

import torch

import checkpoint
import parallel
from config import ConfigError, describe, flatten, keys_in, load_config, one_line, option, toml_text
from core import ModelShape, Tokenizer
from data import read_options
from process import command, ending
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig
from server.endpoint import Endpoint, Limits
from server.loop import EngineLoop
from server.wire import ApiError, Chat, Json
from settings import Config, ModelConfig, settings_of, warn_of_open_end

TOKEN = "PLAINROLL_TOKEN"  # in the environment: a command line can be read by everybody on the machine
LOOK_SECONDS = 1.0  # between two looks for a newer checkpoint
MOST_SECONDS = 60.0  # between two tries of one that cannot be taken
LAST_SECONDS = 0.5  # at the end, in which requests under way get their error


@dataclass(frozen=True)
class ServeConfig:
    host: str = option("127.0.0.1", f"address to listen at; any but a loopback address needs a token in {TOKEN}")
    port: int = option(8000, "port to listen at; 0: any that is free", min=0, max=65535)
    name: str = option("", "name of the model for clients; empty: that of the followed run, else of the folder")
    follow: str = option("", "folder of a run, whose newer checkpoints are taken as they come; empty: none")
    system: str = option("", "system message of chats that have none; empty: data.system of the checkpoint's run")
    chat_options: str = option(
        "",
        "what the chat template reads beside messages, as data.chat_options; empty: those of the checkpoint's run",
    )
    device: str = option("auto", "auto (GPU if there is one), cpu or cuda", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto", "auto (bfloat16 on GPU, float32 on CPU), float32 or bfloat16", choices=("auto", "float32", "bfloat16")
    )
    queue: int = option(1024, "responses that wait or decode at a time; more are refused with status 429", min=1)
    request_seconds: float = option(600.0, "longest time of a request; then it gets status 504", above=0.0, max=1e7)
    max_mib: float = option(8.0, "largest body of a request, in MiB", above=0.0, max=1024.0)
    connections: int = option(1024, "connections at a time; more are closed", min=1, max=65536)


@dataclass(frozen=True)
class ServeFile:
    serve: ServeConfig = field(default_factory=ServeConfig)
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(max_prompt_tokens=2048, max_response_tokens=2048)
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


Words = tuple[dict[str, int], set[int]]  # vocabulary and end tokens


def words_of(folder: Path, tokenizer: Tokenizer, shape: ModelShape) -> Words:
    return tokenizer.get_vocab(), checkpoint.eos_ids(folder, tokenizer, shape.vocab_size)


class Weights:
    """The weights that a server has: where they are from, and how often they were changed."""

    def __init__(self, folder: Path, shape: ModelShape, loop: EngineLoop, words: Words):
        self.folder, self.shape, self.loop, self.words, self.version = folder, shape, loop, words, 0
        self.step = checkpoint.step_of(folder.resolve())  # of a link, by now
        self.lock = threading.Lock()

    def about(self) -> Json:
        c = self.loop.engine.config
        most = min(self.shape.max_positions, c.max_prompt_tokens + c.max_response_tokens)
        about: Json = {"weights": str(self.folder), "version": self.version, "max_model_len": most}
        return about if self.step is None else about | {"step": self.step}

    def take(self, folder: Path) -> None:
        """Have the loop decode with the weights of a folder. Raises ApiError; then the old ones stay.

        They are read into host memory first, so that the engine stands still for one copy only.
        """
        with self.lock:
            try:
                if (folder / checkpoint.CHECKSUMS).exists() and (wrong := checkpoint.damage(folder, of_model=True)):
                    raise ConfigError(wrong)
                shape, _ = checkpoint.check_model(folder, "folder")
                if shape != self.shape:
                    raise ConfigError(f"{folder}: the model has another shape than the one that is served")
                words = words_of(folder, checkpoint.load_tokenizer(folder), shape)
                for kind, own, new in zip(("another vocabulary", "other end tokens"), self.words, words, strict=True):
                    if new != own:
                        raise ConfigError(f"{folder}: the model has {kind} than the one that is served")
                weights = checkpoint.load_model(folder, torch.device("cpu"), self.loop.engine.model.dtype)
            except (ConfigError, OSError) as error:
                raise ApiError(400, str(error)) from None
            except Exception as error:  # as safetensors' own, or no memory: who follows a run tries the next one
                raise ApiError(500, f"{folder}: {one_line(error)}", "server_error") from None
            self.loop.change_weights(weights, self.version + 1)
            self.folder, self.version, self.step = folder, self.version + 1, checkpoint.step_of(folder.resolve())

    def follow(self, run: Path) -> None:
        """Take newer checkpoints of a run as they come, to the server's end.

        One that cannot be taken is told of, and tried again less and less often until there is a newer one.
        """
        seen, failing, told, pause, due = self.folder, Path(), "", 0.0, 0.0
        with suppress(OSError):
            if not checkpoint.list_checkpoints(run):
                print(f"waits for the first checkpoint in {run}", flush=True)
        while not self.loop.is_stopping:
            with suppress(OSError):  # a file system that is away for a while, a console that nobody reads any more
                newest = checkpoint.list_checkpoints(run)[-1:]
                if newest and newest[0] != failing:
                    failing, told, pause, due = newest[0], "", LOOK_SECONDS, 0.0
                if newest and newest[0] != seen and time.monotonic() >= due:
                    try:
                        self.take(newest[0])
                        seen = newest[0]
                        print(f"weights: {seen} (version {self.version})", flush=True)
                    except ApiError as error:
                        pause, due = min(2 * pause, MOST_SECONDS), time.monotonic() + pause
                        if str(error) != told:
                            told = str(error)
                            print(f"passed: {error}", file=sys.stderr, flush=True)
            time.sleep(LOOK_SECONDS)


class Service:
    """A model behind an endpoint. `run` serves until `stop`."""

    def __init__(self, config: ServeFile, folder: Path, token: str = ""):
        """Load the model and take the address. Raises ConfigError."""
        c = config.serve
        check(config, token)
        world = parallel.start(c.device, 60.0)
        auto = "bfloat16" if world.device.type == "cuda" else "float32"
        model = checkpoint.load_model(folder, world.device, getattr(torch, auto if c.dtype == "auto" else c.dtype))
        self.tokenizer: Tokenizer = checkpoint.load_tokenizer(folder)
        words = words_of(folder, self.tokenizer, model.shape)
        self.engine = Engine(model, config.rollout, config.sampling, words[1], self.tokenizer)
        self.engine.runner.capture()
        self.loop, self.config = EngineLoop(self.engine, c.queue), c
        self.weights = Weights(folder, model.shape, self.loop, words)
        name = c.name or os.path.basename(os.path.abspath(c.follow or folder))
        chat = Chat(c.system, read_options(c.chat_options, "serve.chat_options"))
        as_of_run = replace(Config(), model=ModelConfig(path=str(folder)), rollout=config.rollout)
        warn_of_open_end(as_of_run, self.tokenizer, model.shape.vocab_size)
        limits = Limits(c.request_seconds, int(c.max_mib * 2**20), c.connections)
        told = self.weights.about, lambda given: self.weights.take(Path(given))
        try:
            self.endpoint = Endpoint((c.host, c.port), self.loop, self.tokenizer, name, token, limits, *told, chat)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen at {c.host} port {c.port}: {error}; choose another") from None
        self.address = "http://{}:{}/v1".format(
            *(f"[{c.host}]" if ":" in c.host else c.host, self.endpoint.server_port)
        )

    def run(self) -> None:
        """Serve until `stop`. Raises what the engine raises. The calling thread is the engine's."""
        works: list[Callable[[], None]] = [partial(self.endpoint.serve_forever, 0.1)]
        works += [partial(self.weights.follow, Path(self.config.follow))] if self.config.follow else []
        for work in works:
            threading.Thread(target=work, daemon=True).start()
        try:
            self.loop.run()
        finally:
            self.endpoint.shutdown()
            self.endpoint.server_close()
            if self.loop.under_way:
                time.sleep(LAST_SECONDS)

    def stop(self) -> None:
        self.loop.stop()


def check(config: ServeFile, token: str) -> None:
    """Raise ConfigError for settings that one rank cannot serve by, or that would open the server to others."""
    if config.rollout.tensor_parallel > 1 or config.rollout.weights == "sharded" or "RANK" in os.environ:
        raise ConfigError(
            "serve.py decodes on one rank, without torchrun, rollout.tensor_parallel and sharded rollout.weights"
        )
    run = Path(config.serve.follow)
    if not (place := run if run.exists() else run.absolute().parent).is_dir():
        raise ConfigError(f"serve.follow = {str(run)!r}: {place} is no folder, so no run can come there; correct it")
    if not token and not is_loopback(config.serve.host):
        raise ConfigError(f"serve.host = {config.serve.host!r}: others reach it; put a token into {TOKEN} first")
    if token and (not token.isascii() or not token.isprintable() or len(token) < 8 or " " in token):
        raise ConfigError(f"{TOKEN} must have at least 8 characters, all of them letters, digits or signs of ASCII")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. Other names than localhost may lead anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config")
    flags, rest = parser.parse_known_args(argv)
    if flags.help:
        print(USAGE + describe(ServeFile()))
        return 0
    folders, overrides = ([text for text in rest if text.startswith("--") == flag] for flag in (False, True))
    try:
        config = load_config(ServeFile, flags.config, overrides, OTHERS)
        if len(folders) > 1 or not (folders or config.serve.follow):
            raise ConfigError("name one folder of a model, or a run to follow: --serve.follow=RUN_FOLDER")
        followed = [] if folders else checkpoint.list_checkpoints(Path(config.serve.follow))
        if not folders and not followed:
            raise ConfigError(
                f"serve.follow = {config.serve.follow!r} has no checkpoint yet; name a folder to begin with"
            )
        folder = Path(folders[0]) if folders else followed[-1]
        if not (folder / "config.json").exists():
            raise ConfigError(
                f"{folder}: no model there (config.json); name a Hugging Face folder or a checkpoint, or follow a run"
            )
        given = keys_in(flags.config) | {text[2:].partition("=")[0] for text in overrides}
        config = load_config(ServeFile, flags.config, [*of_run(folder, given), *overrides], OTHERS)
        service = Service(config, folder, os.environ.get(TOKEN, ""))
    except (ConfigError, OSError) as error:
        return ending.refuse(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: service.stop())
    print(f"{service.endpoint.name} at {service.address} (Ctrl-C ends)", flush=True)
    service.run()
    return 0


# Of a file of settings: what is for training. A run's file may be given.
OTHERS = {each.name for each in fields(Config)} - {each.name for each in fields(ServeFile)}
OTHERS |= {"rollout.tensor_parallel", "rollout.weights"}


def of_run(folder: Path, given: set[str]) -> list[str]:
    """Return how the run of a checkpoint writes prompts, samples and ends answers, but for keys that are `given`."""
    if not (path := settings_of(folder)):
        return []
    others = {key.partition(".")[0] for key in keys_in(str(path))} - {"data", "rollout", "sampling"}
    own = load_config(Config, str(path), without=others)  # the rest may be of older code
    found: dict[str, object] = {f"sampling.{key}": value for key, (value, _) in flatten(own.sampling).items()}
    found |= {"serve.system": own.data.system, "serve.chat_options": own.data.chat_options}
    found |= {"rollout.stop": own.rollout.stop}
    return [f"--{key}={toml_text(value)}" for key, value in found.items() if key not in given]


USAGE = f"""plainroll: a model behind an OpenAI-compatible endpoint

usage: python serve.py FOLDER [--config FILE.toml] [--section.key=value ...]
       python serve.py --serve.follow=RUN_FOLDER

  FOLDER          a Hugging Face folder or a checkpoint of a run; without it the newest of serve.follow
  --config FILE   settings from a TOML file, which may be that of a run. A checkpoint of a run has its run's sampling,
                  stop texts, system message and chat options, unless they are given
  --help          this text

POST /v1/completions, /v1/chat/completions, /weights; GET /v1/models, /health. Clients send the token in {TOKEN}, if
there is one, as api_key. One rank serves.

Every key, its default and its meaning:
"""

if __name__ == "__main__":
    command.run(main)
