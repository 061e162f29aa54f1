"""Hugging Face folders in and out; checkpoints, from which a run continues its trajectory."""

import json
import os
import shutil
import warnings
import zlib
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

import parallel
from config import ConfigError, regular
from core import ModelShape, Tokenizer
from engine.host import data_of
from model import Model, empty_model, parse_shape, stored_name
from parallel import World
from policies.placement import assign_by_load
from policies.step_times import PROFILE_NAME
from weights import sharding
from weights.lora import Adapters

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30  # of a file of weights, at most
STATE = "state.json"
OPTIMIZER = "optimizer"  # the folder of a checkpoint's tensors beside the model
BEST = "best"  # a link to the checkpoint of the best evaluation
CHECKSUMS = "checksums.json"  # CRC-32 of every file of a checkpoint
LAST_WAIT = (
    60.0  # seconds, at most, for the checkpoint under way when an exception ends the run: others may have failed
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Files that a checkpoint copies from the model's folder, beside config.json. No other file there is read.
CARRIED = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
vocab.json vocab.txt merges.txt tokenizer.model chat_template.jinja chat_template.json""".split()
WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")  # types of weights; all others are quantised or not weights
SCORE = "score.weight"  # the head of a reward model
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single rank saves and loads alone


# ---- Hugging Face folders ----------------------------------------------------------------------------------------


def read_config(folder: str | Path, key: str = "model.path") -> dict:
    """Return `config.json` of the model folder that `key` names. Raises ConfigError if it is not a model folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{key} = {str(folder)!r}: no such folder; give a local Hugging Face folder, or leave it empty"
        )
    if not path.exists() and (Path(folder) / "checkpoints").is_dir():
        raise ConfigError(f"{key} = {str(folder)!r}: a run folder; name one of its checkpoints/")
    return _read_json(path)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(_own(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror}); a model folder holds config.json, weights and tokenizer"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON {type(value).__name__}, not an object; copy the file again")
    return value


def _own(path: Path) -> Path:
    """Return the path of a regular file. Raises ConfigError for a link to a file outside of the folder.

    Files of a model go into every checkpoint. In Hugging Face's cache they are links to the blobs beside snapshots/.
    """
    folder, real = path.parent.resolve(), Path(os.path.realpath(path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if path.is_symlink() and real.parent not in (folder, blobs):
        raise ConfigError(f"{path}: a link to {real}, outside of its folder; copy that file here")
    return regular(path)


def carried_files(folder: Path) -> list[Path]:
    """Return the files of CARRIED that the folder has. Raises ConfigError for a file that cannot be copied."""
    files = [folder / name for name in CARRIED if os.path.lexists(folder / name)]
    for path in files:
        try:
            with open(_own(path), "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot read it ({error.strerror}); copy the file again") from None
    return files


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ConfigError if that fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # late: it takes seconds to import

    carried_files(Path(folder))
    # Without these files transformers would make an empty tokenizer.
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{folder}: cannot load the tokenizer: no tokenizer.json; copy the tokenizer's files too")
    settings = Path(folder) / "tokenizer_config.json"
    generic = settings.exists() and _read_json(settings).get("tokenizer_class") == "TokenizersBackend"
    # For every qwen2 folder AutoTokenizer takes Qwen2Tokenizer, which changes text (NFC), whatever the file says.
    kind = PreTrainedTokenizerFast if generic else AutoTokenizer
    try:
        return cast(Tokenizer, kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
    except Exception as error:  # transformers raises many kinds of errors for an unusable tokenizer
        raise ConfigError(
            f"{folder}: cannot load the tokenizer ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from None


def eos_ids(folder: str | Path, tokenizer: Tokenizer, vocab_size: int) -> set[int]:
    """Return every token that ends a response: those of tokenizer, config and generation config."""
    ids: list = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        value = _read_json(path).get("eos_token_id") if path.exists() else None
        ids += value if isinstance(value, list) else [value]
    ids = [id for id in ids if id is not None]
    if wrong := [id for id in ids if type(id) is not int or not 0 <= id < vocab_size]:
        raise ConfigError(
            f"{folder}: eos_token_id = {wrong[0]!r} is not a token; write a number from 0 to {vocab_size - 1}, or a "
            "list of them"
        )
    if not ids:
        raise ConfigError(f"{folder}: neither tokenizer nor config names an end token (eos_token_id)")
    return set(ids)


def num_labels(config: dict) -> int:
    """Return the number of outputs of a reward model (...ForSequenceClassification); 0 for a causal model."""
    names = config.get("architectures") or ()
    if not isinstance(names, list | tuple) or not any(str(n).endswith("ForSequenceClassification") for n in names):
        return 0
    return config.get("num_labels") or len(config.get("id2label") or ("0", "1"))


def check_model(
    folder: str | Path, key: str = "model.path", rewards: bool = False
) -> tuple[ModelShape, dict[str, tuple[Path, str]]]:
    """Return the decoder's shape, and each weight's file and name there. Raises ConfigError for an unusable folder.

    `rewards`: accept reward models too. They have no language head, but a head named SCORE.
    """
    folder = Path(folder)
    config = read_config(folder, key)
    shape, labels = parse_shape(config, str(folder / "config.json")), num_labels(config)
    if labels and not rewards:
        raise ConfigError(
            f"{key} = {str(folder)!r} is a reward model ({config['architectures'][0]}), which generates no text; give "
            "a causal model"
        )
    found, stored_as = _stored_weights(folder)
    if labels:
        shape = replace(shape, tied=True)
    elif shape.tied and HEAD in found:  # as in `transformers`, the file outweighs config.json
        found.setdefault(EMBEDDING, found[HEAD])
        shape = replace(shape, tied=_are_equal(found[EMBEDDING], found[HEAD]))
    try:
        wanted = _expected_weights(shape)
    except RuntimeError as error:
        raise ConfigError(f"{folder / 'config.json'}: the sizes are too large ({error}); correct them") from None
    if labels:
        wanted[SCORE] = [labels, shape.hidden_size]
    if missing := wanted.keys() - found.keys():
        raise ConfigError(f"{folder}: {len(missing)} weights are missing, such as {min(missing)}")
    for name, size in wanted.items():
        (path, stored), (shape_there, kind) = found[name], stored_as[found[name]]
        if shape_there != size:
            raise ConfigError(f"{path}: {stored} has shape {shape_there}, but config.json says {size}")
        if kind not in WEIGHT_TYPES:
            raise ConfigError(
                f"{path}: {stored} is of type {kind}; plainroll reads {', '.join(WEIGHT_TYPES)}: convert it"
            )
    return shape, {name: found[name] for name in wanted}


def _stored_weights(folder: Path) -> tuple[dict[str, tuple[Path, str]], dict[tuple[Path, str], tuple[list[int], str]]]:
    """Return each weight's file and name there, by its name in a whole model, and the shape and type of each.

    The file of a bare decoder has the same names without "model.".
    """
    found, stored_as = {}, {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                for stored in sorted(file.keys()):
                    is_whole = stored.startswith(("model.", HEAD, SCORE))
                    name = stored if is_whole else f"model.{stored}"
                    if is_whole or name not in found:
                        found[name] = path, stored
                    tensor = file.get_slice(stored)
                    stored_as[path, stored] = tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot read the weights ({error}); copy the file again") from None
    return found, stored_as


def _are_equal(*stored: tuple[Path, str]) -> bool:
    tensors = []
    for path, name in stored:
        with safe_open(path, "pt") as file:
            tensors.append(file.get_tensor(name))
    first, second = tensors
    return first.shape == second.shape and torch.equal(first, second.to(first.dtype))


def _expected_weights(shape: ModelShape) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in _stored(empty_model(shape).export(), shape).items()}


def _stored(tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return tensors of `Model.hf_tensors` as folders have them: in some families several are one."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(stored_name(shape, name), []).append(tensor)
    return {name: torch.cat(own) if len(own) > 1 else own[0] for name, own in parts.items()}


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Model:
    """Build the decoder of a Hugging Face folder and fill it. Raises ConfigError as `check_model` does."""
    shape, weights = check_model(folder)
    fill(model := empty_model(shape, dtype).to_empty(device=device), weights)
    return model


def load_judge(folder: str | Path, device: torch.device, dtype: torch.dtype) -> tuple[Model, Tensor | None]:
    """Load the model of `judge.path` as `load_model` does, and a reward model's head [labels, hidden_size] or None."""
    shape, weights = check_model(folder, "judge.path", rewards=True)
    fill(model := empty_model(shape, dtype).to_empty(device=device), weights)
    if SCORE not in weights:
        return model, None
    path, stored = weights[SCORE]
    with safe_open(path, "pt") as file:
        score = file.get_tensor(stored).to(device, dtype)
    _check_finite(score, path, stored)
    return model, score


def fill(model: Model, weights: dict[str, tuple[Path, str]]) -> None:
    """Fill a model from the files that `check_model` found; each rank its part of one that lies over several.

    One weight at a time is whole on the device. Raises ConfigError for a weight that is not finite.
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in {path for path, _ in weights.values()}}
        for weight, parts in model.hf_parts():
            is_part = isinstance(weight, DTensor)
            whole = torch.empty(weight.shape, dtype=model.dtype, device=weight.device) if is_part else weight.data
            views: dict[str, list[Tensor]] = {}
            for name, view, _ in parts(whole):
                views.setdefault(stored_name(model.shape, name), []).append(view)
            for name, own in views.items():
                path, stored = weights[name]
                tensor = files[path].get_tensor(stored)
                for view, rows in zip(own, tensor.split([v.numel() * len(tensor) // tensor.numel() for v in own])):
                    view.copy_(rows.view(view.shape))
                    _check_finite(view, path, stored)
            if is_part:
                sharding.take_part(weight, whole)


def fingerprint(weights: dict[str, tuple[Path, str]]) -> int:
    """Return a CRC-32 of the first row of each weight that `check_model` found: enough to tell other weights."""
    value = 0
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in {path for path, _ in weights.values()}}
        for _, (path, stored) in sorted(weights.items()):
            value = zlib.crc32(files[path].get_slice(stored)[:1].contiguous().view(torch.uint8).numpy(), value)
    return value


def _check_finite(tensor: Tensor, path: Path, stored: str) -> None:
    if not tensor.isfinite().all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(f"{path}: {stored} is not finite in {kind}; use another folder")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(f"{folder / INDEX}: no weight_map, which names the file of each weight; copy it again")
        files = [folder / name for name in sorted(set(names.values()))]
        if away := [path for path in files if path.parent != folder]:
            raise ConfigError(f"{folder / INDEX}: {away[0]} is outside of the folder; name only files inside")
    else:
        files = [folder / WEIGHTS]
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; plainroll reads safetensors ({WEIGHTS}, or shards with {INDEX})")
    return files


def save_model(folder: str | Path, model: Model, source: str | Path) -> None:
    """Write a folder that `transformers` loads: weights of `model`, config and tokenizer of the `source` folder."""
    weights, others = _export(model, Path(source))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, tensors in weights.items():
        save_file(tensors, Path(folder) / name, {"format": "pt"})
    for name, content in others.items():
        (Path(folder) / name).write_bytes(content)


def _export(
    model: Model, source: Path, rank: int = 0, num_ranks: int = 1
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
    """Return the content of a folder that `transformers` loads: tensors by file of weights, and all other files.

    The tensors are copies in host memory, in the dtype that the model computes in. Of `num_ranks` ranks that write
    together, each gets other files of weights. Collective where the model lies over several ranks: one weight at a time
    is whole on the device.
    """
    sizes = _stored(empty_model(model.shape, model.dtype).export(), model.shape)
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    files = dict(sorted(split.filename_to_tensors.items())[rank::num_ranks])
    wanted, own = {name for names in files.values() for name in names}, dict[str, Tensor]()
    for weight, parts in model.hf_parts():
        own |= {
            name: _on_host(view.to(model.dtype)).reshape(like)
            for name, view, like in parts(data_of(sharding.whole(weight.detach())))
            if stored_name(model.shape, name) in wanted
        }
    own = _stored(own, model.shape)
    weights = {file: {name: own[name] for name in names} for file, names in files.items()}
    config = read_config(source)
    for key in ("torch_dtype", "auto_map"):  # an old name; Python files, which are not copied
        config.pop(key, None)
    config["tie_word_embeddings"] = model.shape.tied
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    others = {"config.json": json.dumps(config, indent=2).encode()}
    if split.is_sharded:
        others[INDEX] = json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}).encode()
    return weights, others | {path.name: path.read_bytes() for path in carried_files(source)}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


# ---- checkpoints of a run ----------------------------------------------------------------------------------------


class Checkpoints:
    """Writes the checkpoints of a run while training goes on, one at a time. Making one is collective.

    Each rank first copies its share of a checkpoint to host memory. Then a thread of each rank writes the share under
    another name, by torch.distributed.checkpoint and a process group of its own. The first rank renames the folder when
    all have written: a checkpoint exists whole or not at all. `shard`: ranks that hold parts of the same tensors. All
    ranks make the same calls. As a context it waits for the checkpoint under way when an exception ends the run.
    """

    def __init__(
        self,
        run: Path,
        source: Path,
        keep: int,
        world: World,
        shard: int = 1,
        num_trainers: int = 0,
        keep_best: bool = False,
    ):
        """`num_trainers`: the first so many ranks have the tensors; 0: all. `keep_best`: beside the newest."""
        self.run, self.source, self.keep, self.keep_best = run, source, keep, keep_best
        self.best: dict = {}  # "step" and "score" of the best evaluation
        self.world = parallel.beside(world)
        self.replica, self.num_replicas = world.rank // shard, (num_trainers or world.size) // shard
        self.under_way: Future | None = None

    def rated(self, step: int, evaluation: dict) -> dict:
        """Return the record of an evaluation, with the best step so far: the first of the highest avg@k.

        Step 0 is the model that the run started with: it can be the best, and has no checkpoint.
        """
        if not self.keep_best:
            return evaluation
        score = next(value for name, value in evaluation.items() if name.startswith("avg@"))
        if not self.best or score > self.best["score"]:
            self.best = {"step": step, "score": score}
        return evaluation | {"best": self.best}

    @property
    def best_step(self) -> int:
        return self.best.get("step", -1)

    def _folder_of(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step_{step:06d}"

    def save(
        self, step: int, model: Model, tensors: dict[str, Tensor], state: dict, adapters: Adapters | None = None
    ) -> None:
        """Begin to write `run/checkpoints/step_N`: the model, tensors by name, a state of plain values. Collective.

        `tensors` are the same on all ranks, or DTensors. All may change when this returns. `adapters`, which the model
        has merged, are written in a folder of their own, too. Raises OSError when the checkpoint before it could not be
        written.
        """
        self.wait()
        self.folder, best = self._folder_of(step), self._folder_of(self.best_step)
        weights, others = _export(model, self.source, self.world.rank, self.world.size)
        if adapters and self.world.is_main:
            files, about = adapters.files(self.source)
            weights |= {path: {name: _on_host(t) for name, t in own.items()} for path, own in files.items()}
            others |= about
        writer = _Writer(self.folder, self.keep, best, weights, others | {STATE: json.dumps(state).encode()})
        names = list(tensors)
        shares = assign_by_load([tensors[name].nbytes for name in names], self.num_replicas)
        mine = shares[self.replica] if self.replica < self.num_replicas else []  # ranks that only decode have none
        own = {names[i]: tensors[names[i]] for i in mine}
        group, alone = self.world.objects, self.world.size == 1
        self.under_way = cast(Future, dcp.async_save(own, storage_writer=writer, process_group=group, no_dist=alone))

    def check(self) -> None:
        """Raise OSError when the checkpoint under way could not be written. Never waits."""
        if self.under_way and self.under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint under way is whole. Raises OSError when it could not be written."""
        under_way, self.under_way = self.under_way, None
        try:
            if under_way:
                under_way.result(self.world.timeout_seconds)
            return
        except TimeoutError:
            reason = f"not done after run.timeout_seconds = {self.world.timeout_seconds:g}"
        except dcp.api.CheckpointException as error:  # the same on all ranks
            cause, _ = next(iter(error.failures.values()))
            if not isinstance(cause, OSError | RuntimeError | SafetensorError):  # the last two on a full disk
                raise cause from error
            reason = str(cause).partition("\n")[0]
            if self.world.is_main:
                _remove_leftovers(self.folder.parent)
        free = shutil.disk_usage(self.run).free / 2**20
        raise OSError(
            f"cannot write {self.folder} ({reason}; {free:.0f} MiB are free); make room or remove the cause, and "
            "resume: the checkpoint before it is whole"
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and not parallel.is_lost(error):
            self.world = replace(self.world, timeout_seconds=min(self.world.timeout_seconds, LAST_WAIT))
            with suppress(Exception):  # the first error is the one to tell
                self.wait()


class _Writer(HuggingFaceStorageWriter):
    """Writes one checkpoint as torch.distributed.checkpoint asks for it, in a thread except for `stage`.

    The files are safetensors and JSON: torch's other writer pickles, and reading a pickle can run code.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        best: Path,
        weights: dict[str, dict[str, Tensor]],
        others: dict[str, bytes],
    ):
        super().__init__(str(folder))
        self.folder, self.keep, self.best, self.weights, self.others = folder, keep, best, weights, others
        self.part = folder.with_name(f".part_{folder.name}")

    def stage(self, state_dict: dict) -> dict:
        return {name: _on_host(tensor) for name, tensor in state_dict.items()}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make room. (The first rank, before any writes.)"""
        _remove_leftovers(self.folder.parent)
        (self.part / OPTIMIZER).mkdir(parents=True)
        for name in self.weights:
            (self.part / name).parent.mkdir(exist_ok=True)
        return [replace(plan, storage_data=f"{OPTIMIZER}/shard-{rank:05d}{SUFFIX}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future:
        """Write this rank's files; give the name and CRC-32 of each.

        Not by torch's own way to safetensors: it copies everything twice, and holds up all other threads meanwhile.
        """
        tensors, offsets = {}, {}
        for item in plan.items:
            assert item.tensor_data, "a tensor: the state has no other values"
            tensors[item.index.fqn] = cast(Tensor, planner.resolve_data(item))
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        written = [self._write(name, weights, format="pt") for name, weights in self.weights.items()]
        written.append(self._write(plan.storage_data, tensors, **{CUSTOM_METADATA_KEY: json.dumps(offsets)}))
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(written)
        return done

    def _write(self, name: str, tensors: dict[str, Tensor], **about: str) -> WriteResult:
        path = self.part / name
        save_file(tensors, path, about)
        _sync(path)
        return WriteResult(MetadataIndex(name), path.stat().st_size, _checksum(path))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the other files and show the checkpoint. (The first rank, when all have written.)"""
        checksums = {result.index.fqn: result.storage_data for rank in results for result in rank}
        checksums |= {name: zlib.crc32(content) for name, content in self.others.items()}
        self.others[CHECKSUMS] = json.dumps(checksums, indent=1).encode()
        for name, content in self.others.items():
            (self.part / name).write_bytes(content)
            _sync(self.part / name)
        _sync(self.part / OPTIMIZER)
        _sync(self.part)
        if self.folder.exists():  # only when a resumed run writes the same step again
            _remove(self.folder)
        self.part.rename(self.folder)
        _sync(self.folder.parent)
        saved = list_checkpoints(self.folder.parent.parent)
        if self.best in saved:
            _link(self.folder.with_name(BEST), self.best.name)
        else:  # what it names was the best, or will be gone
            with suppress(OSError):  # a copy of a run may have a folder there
                self.folder.with_name(BEST).unlink()
        for old in saved[: -self.keep]:
            if old != self.best:
                _remove(old)


def _link(path: Path, target: str) -> None:
    """Let a link point to `target`, a name beside it; does nothing on file systems without links."""
    new = path.with_name(f".{path.name}")
    with suppress(OSError):
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(path)


def _remove_leftovers(checkpoints: Path) -> None:
    """Remove what saves that failed or were killed have left."""
    for leftover in checkpoints.glob(".*_step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Hide a checkpoint, then delete it: a kill in between leaves nothing half-deleted in the list."""
    hidden = folder.with_name(f".old_{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # a network's file system may keep what another still reads


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that the rename cannot reach the disk before the content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def damage(folder: Path, rank: int = 0, num_ranks: int = 1, of_model: bool = False) -> str:
    """Return a message if a file of a checkpoint is damaged, else "". Each rank looks at other files.

    `of_model`: of its model alone; what a run resumes from may have been left out of a copy.
    """
    if (folder / "state.pt").exists():
        return f"{folder}: an earlier version has written it; this one can start a new run with model.path={folder}"
    remedy = ""
    try:
        known = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        read = {
            STATE,
            *(str(path.relative_to(folder)) for end in (".json", SUFFIX) for path in folder.rglob(f"*{end}")),
        }
        if unknown := read - known.keys() - {CHECKSUMS, PROFILE_NAME}:  # profiler.py may put its file here
            wrong = f"{folder / CHECKSUMS}: has no checksum of {min(unknown)}"
            remedy = "move that file away if it is yours, or "
        else:
            looked_at = {name: known[name] for name in known if not of_model or "/" not in name and name != STATE}
            own = sorted(looked_at.items())[rank::num_ranks]
            changed = (folder / name for name, value in own if _checksum(folder / name) != value)
            wrong = next((f"{path}: damaged since it was written" for path in changed), "")
    except (OSError, ValueError, AttributeError) as error:
        wrong = f"{folder}: cannot be read ({error})"
    last = "copy it again" if of_model else f"remove {folder} to resume from the checkpoint before it"
    return wrong and f"{wrong}; {remedy}{last}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return whole checkpoints, oldest first."""
    found = ((step_of(path), path) for path in (run / "checkpoints").glob("step_*"))
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder by its name; None: it has another name."""
    start, _, step = folder.name.partition("step_")
    return int(step) if not start and step.isdecimal() else None


class State(dict):
    """Plain values of a checkpoint. A key that they lack raises ConfigError."""

    def __init__(self, folder: Path, values: dict):
        super().__init__(values)
        self.folder = folder

    def __missing__(self, key: str) -> None:
        folder = self.folder
        raise ConfigError(f"{folder / STATE}: has no {key!r}; remove {folder} to resume from the one before it")


def load_state(folder: Path) -> State:
    """Return the `state` of a checkpoint that is not damaged."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"), object_hook=partial(State, folder))


def load_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of a checkpoint by name, DTensors with this rank's part. Collective.

    Raises ConfigError when the checkpoint has others, or files that cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder / OPTIMIZER))
    try:
        stored = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise ConfigError(f"{folder / OPTIMIZER}: {error}; remove {folder} to resume from the one before it") from None
    if others := stored.keys() ^ tensors.keys():
        raise ConfigError(
            f"{folder}: {min(others)} is only there or only in this run; resume with the same model.dtype"
        )
    dcp.load(tensors, storage_reader=reader, process_group=world.objects, no_dist=world.size == 1)
