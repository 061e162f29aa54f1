"""Hugging Face folders in and out; checkpoints, from which a run continues its trajectory."""

import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import ConfigError, regular
from core import Tokenizer
from model import Model, ModelShape, parse_shape

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
STATE = "state.pt"
CHECKSUMS = "checksums.json"  # CRC-32 of every file of a checkpoint
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Files that a checkpoint copies from the model's folder, beside config.json. No other file there is read.
CARRIED = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
vocab.json vocab.txt merges.txt tokenizer.model chat_template.jinja chat_template.json""".split()
WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")  # types of weights; all others are quantised or not weights
SCORE = "score.weight"  # the head of a reward model


# ---- Hugging Face folders ----------------------------------------------------------------------------------------


def read_config(folder: str | Path, key: str = "model.path") -> dict:
    """Return `config.json` of the model folder that `key` names. Raises ConfigError if it is not a model folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{key} = {str(folder)!r}: no such folder; give a local Hugging Face folder, or leave it empty"
        )
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


def _read_tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _are_equal(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    first, second = _read_tensor(*one), _read_tensor(*other)
    return one == other or (first.shape == second.shape and torch.equal(first, second.to(first.dtype)))


def _expected_weights(shape: ModelShape) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in Model(shape).export().items()}


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Model:
    """Build the decoder of a Hugging Face folder and fill it. Raises ConfigError as `check_model` does."""
    return _load(device, dtype, *check_model(folder))[0]


def load_judge(folder: str | Path, device: torch.device, dtype: torch.dtype) -> tuple[Model, Tensor | None]:
    """Load the model of `judge.path` as `load_model` does, and a reward model's head [labels, hidden_size] or None."""
    shape, weights = check_model(folder, "judge.path", rewards=True)
    return _load(device, dtype, shape, weights)


def _load(
    device: torch.device, dtype: torch.dtype, shape: ModelShape, weights: dict[str, tuple[Path, str]]
) -> tuple[Model, Tensor | None]:
    with torch.device("meta"):
        model = Model(shape)
    model = model.to(dtype).to_empty(device=device)
    targets = {name: view for name, view, _ in model.hf_tensors()}
    for path in sorted({path for path, _ in weights.values()}):
        with safe_open(path, "pt") as file:
            for name, stored in ((n, stored) for n, (holder, stored) in weights.items() if holder == path):
                tensor = file.get_tensor(stored)
                if name == SCORE:
                    targets[SCORE] = torch.empty_like(tensor, dtype=dtype, device=device)
                targets[name].copy_(tensor.view(targets[name].shape))
                if not targets[name].isfinite().all():
                    kind = str(dtype).removeprefix("torch.")
                    raise ConfigError(f"{path}: {stored} is not finite in {kind}; use another folder")
    return model, targets.get(SCORE)


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
    folder, source = Path(folder), Path(source)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, model)
    config = read_config(source)
    config.pop("torch_dtype", None)
    config["tie_word_embeddings"] = model.shape.tied
    config["dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in carried_files(source):
        shutil.copyfile(path, folder / path.name)


def save_weights(folder: Path, model: Model, max_shard_bytes: int = 5 * 2**30) -> None:
    """Write safetensors under Hugging Face names; weights larger than one shard become several, with an index."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.export().items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_bytes)
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):  # of an earlier export
        old.unlink(missing_ok=True)
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


# ---- checkpoints of a run ----------------------------------------------------------------------------------------


def save_checkpoint(run: Path, step: int, model: Model, source: str | Path, state: dict, keep: int) -> Path:
    """Write `run/checkpoints/step_N` under another name, then rename it: it exists whole or not at all."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    for leftover in folder.parent.glob(".*_step_*"):  # of a save that was killed
        shutil.rmtree(leftover)
    part = folder.with_name(f".part_{folder.name}")
    try:
        save_model(part, model, source)
        torch.save(state, part / STATE)
        checksums = {path.name: _checksum(path) for path in sorted(part.iterdir())}
        (part / CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
        for path in part.iterdir():
            _sync(path)
        _sync(part)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own on a full disk
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(run).free / 2**20
        raise OSError(
            f"cannot write {folder} ({str(error).partition(chr(10))[0]}; {free:.0f} MiB are free); make room or "
            "remove the cause, and resume: the checkpoint before it is whole"
        ) from None
    if folder.exists():  # only when a resumed run writes the same step again
        _remove(folder)
    part.rename(folder)
    _sync(folder.parent)
    for old in list_checkpoints(run)[:-keep]:
        _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Hide a checkpoint, then delete it: a kill in between leaves nothing half-deleted in the list."""
    hidden = folder.with_name(f".old_{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


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


def damage(folder: Path) -> str:
    """Return a message if a file of a checkpoint is damaged, else ""."""
    if not (folder / CHECKSUMS).exists():  # an old version has written it
        return ""
    try:
        known = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        wrong = [name for name, value in known.items() if _checksum(folder / name) != value]
    except (OSError, ValueError, AttributeError) as error:
        return f"{folder}: cannot be read ({error}); remove {folder} to resume from the checkpoint before it"
    if not wrong:
        return ""
    return f"{folder / wrong[0]}: damaged since it was written; remove {folder} to resume from the checkpoint before it"


def list_checkpoints(run: Path) -> list[Path]:
    """Return whole checkpoints, oldest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def load_state(folder: Path) -> dict:
    """Return the `state` that was given to `save_checkpoint`. Its tensors are read from the file when they are used."""
    try:
        return torch.load(folder / STATE, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise ConfigError(
            f"{folder / STATE}: damaged ({error}); remove {folder} to resume from the checkpoint before it"
        ) from None
