"""The CPU's compiled kernels: who takes what, the same tokens with and without them, no compiler at all."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread

import pytest
import torch
from test_drafts import Foresight
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear

from core import Sample
from engine import cpu, kernels, native
from engine.cpu import Packed, can_pack, few_sizes
from engine.drafts import Drafter, Drafts
from engine.rows import Rows
from engine.shard import Shard
from model import Model, parse_shape
from parallel import World, make_tp_groups
from rollout import Engine, RolloutConfig
from sampling import SamplingConfig

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(not native.library(), reason="no C++ compiler")
needs_tiles = pytest.mark.skipif(not native.has_tiles(), reason="a CPU without a matrix unit")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Look for the compiler again, now and afterwards."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def model() -> Model:
    """A model with heads as large as the kernels want them."""
    config = dict(model_type="qwen3", vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    config |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    torch.manual_seed(0)
    return Model(parse_shape(config, "here"))


def generate(
    model: Model, ends: Iterable[int] = (), drafter: Drafter | None = None, num_prompts: int = 4, num_responses: int = 3
) -> list[Sample]:
    config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=40, page_size=8, kv_gib=0.01, max_running=6)
    engine = Engine(model, config, SamplingConfig(temperature=0.9), ends)
    engine.drafter = drafter
    prompts = [[3 + i, *range(5, 9 + i)] for i in range(num_prompts)]
    return [sample for group in engine.generate(prompts, num_responses, seed=2) for sample in group]


def names_called(monkeypatch) -> set[str]:
    """Return a set to which the names of called kernels are added."""
    called, call = set(), native._call
    monkeypatch.setattr(native, "_call", lambda name, *args: (called.add(name), call(name, *args)))
    return called


@pytest.mark.slow
@needs_compiler
def test_an_engine_draws_the_same_tokens_by_compiled_kernels(model: Model, monkeypatch) -> None:
    called, fused = names_called(monkeypatch), generate(model)
    assert (
        called >= {"decode"} and not called & {"paged_decode", "rope_and_write"} or not native.can_fuse(torch.ones(1))
    )
    monkeypatch.setattr(native, "can_fuse", lambda norm: False)
    one_by_one = generate(model)
    assert [(s.token_ids, s.logprobs) for s in fused] == [(s.token_ids, s.logprobs) for s in one_by_one]
    monkeypatch.setattr(Packed, "MIN_WORK", 0)
    monkeypatch.setattr(Packed, "SMALL", 0)
    compiled = generate(model) + generate(model, num_prompts=1, num_responses=1)
    assert called | {"decode"} == native.SIGNATURES.keys() - native.OF_TRAINING, "a kernel that no engine takes"
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "_call", None)
    plain = generate(model) + generate(model, num_prompts=1, num_responses=1)
    assert [s.token_ids for s in compiled] == [s.token_ids for s in plain]
    for mine, torchs in zip(compiled, plain, strict=True):
        assert mine.logprobs == pytest.approx(torchs.logprobs, abs=1e-5)


@needs_compiler
@pytest.mark.skipif(cpu.thread_setters() is None, reason="a build of torch without MKL or OpenMP")
@pytest.mark.parametrize(("little", "num_threads"), [(0, 3), (cpu.LITTLE, 1)])
def test_a_little_step_is_one_threads(model: Model, little: int, num_threads: int, monkeypatch) -> None:
    """And the others are back after it, though it fails."""
    seen, decode, threads = set[int](), Shard.decode, torch.get_num_threads()
    monkeypatch.setattr(cpu, "LITTLE", little)
    monkeypatch.setattr(Shard, "decode", lambda *args: (seen.add(torch.get_num_threads()), decode(*args))[1])
    torch.set_num_threads(3)
    try:
        generate(model)
        assert seen == {num_threads} and torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), cpu.threads_for(0):
            assert torch.get_num_threads() == num_threads
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(cpu.thread_setters() is None, reason="a build of torch without MKL or OpenMP")
def test_others_keep_their_threads_while_one_is_alone() -> None:
    threads, others = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        with cpu.threads_for(0):
            other = Thread(target=lambda: others.append(torch.get_num_threads()))  # its first look
            other.start()
            other.join()
        assert others == [3]
    finally:
        torch.set_num_threads(threads)


def test_a_step_counts_its_weights_and_what_it_attends_to(model: Model) -> None:
    shape, shard = model.shape, Shard(model, make_tp_groups(World(0, 1, torch.device("cpu")), [1])[1], prepack=False)
    weights = sum(p.numel() for p in model.parameters()) - (model.embed.weight.numel() if model.head else 0)
    assert shard.multiplications(0) == weights
    of_a_key = 2 * shape.num_layers * shape.num_heads * shape.head_dim
    assert shard.multiplications(100) == weights + 100 * of_a_key


@needs_compiler
@pytest.mark.parametrize("right", [1.0, 0.8])
def test_steps_with_drafts_are_compiled_too_and_change_nothing(model: Model, right: float, monkeypatch) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)  # every token depends on the whole context
    ends = [generate(model)[5].token_ids[20]]
    plain = generate(model, ends)
    for name in ("paged_decode_torch", "rope_and_write_torch", "race_torch"):
        monkeypatch.setattr(kernels, name, None)
    monkeypatch.setattr(Drafts, "settle", None)
    monkeypatch.setattr(Rows, "_end", None)
    drafter = Foresight({sample.id: sample for sample in plain}, longest=20, right=right, asked=0.7)
    for mine, its in zip(generate(model, ends, drafter), plain, strict=True):
        assert replace(mine, logprobs=()) == replace(its, logprobs=())
        assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4)
    assert drafter.drafted > 100 and (drafter.accepted == drafter.drafted) == (right == 1.0)
    assert {sample.finish_reason for sample in plain} == {"stop", "length"}


@needs_compiler
def test_an_engine_in_bfloat16_decodes_by_compiled_kernels_as_by_torch(model: Model, monkeypatch) -> None:
    """Rounding may draw other tokens: so the log-probs of the same first tokens are compared."""
    called = names_called(monkeypatch)
    half = model.bfloat16()
    fused = generate(half)
    monkeypatch.setattr(native, "can_fuse", lambda norm: False)
    compiled = generate(half)
    assert [(s.token_ids, s.logprobs) for s in fused] == [(s.token_ids, s.logprobs) for s in compiled]
    takes_many = native.has_tiles() or native.multiplies_all(torch.bfloat16)
    of_other_sizes = set() if takes_many else {"multiply", "decode"}
    assert called == native.SIGNATURES.keys() - native.OF_TRAINING - of_other_sizes
    monkeypatch.setattr(native, "library", lambda: None)
    plain = generate(half)
    alike = 0
    for mine, torchs in zip(compiled, plain, strict=True):
        pairs = zip(mine.token_ids, torchs.token_ids, strict=True)
        alike += (same := next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine.token_ids)))
        assert mine.logprobs[:same] == pytest.approx(torchs.logprobs[:same], abs=0.03)
    assert alike > 100


FUSED = {  # of decoders: with biases and windows, with norms of queries and keys, with large weights
    "qwen2": dict(intermediate_size=100, use_sliding_window=True, max_window_layers=1, sliding_window=9),
    "qwen3": dict(head_dim=32),
    "llama": dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, mlp_bias=True, attention_bias=True),
}


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_all_layers_in_one_call_are_the_layers_one_by_one(family: str, dtype: torch.dtype, monkeypatch) -> None:
    """Bit by bit, and what they write too: of rows that products take in different ways, and of a padding row."""
    config = dict(model_type=family, vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    config |= dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True) | FUSED[family]
    torch.manual_seed(0)
    model = Model(parse_shape(config, "here")).to(dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    shard = Shard(model, make_tp_groups(World(0, 1, torch.device("cpu")), [1])[1])
    called, most = names_called(monkeypatch), shard.most_fused
    assert most >= (8 if dtype == torch.float32 else 1) or not native.can_fuse(shard.norm)

    def compare(n: int) -> None:
        table, positions = torch.randperm(4 * n).view(n, 4).int(), torch.randint(0, 32, (n,))
        positions[1 + n // 2 :: 7] = -1
        before = torch.randn(shard.kv_shape(4 * n, 8)).to(dtype)
        pages, others, tokens = before.clone(), before.clone(), torch.randint(0, 50, (n,))
        called.clear()
        found = shard.decode(tokens, positions, table, pages)
        assert called == {"decode"}
        shard.most_fused = n - 1
        assert torch.equal(found, shard.decode(tokens, positions, table, others)) and len(called) > 3
        assert torch.equal(pages, others) and not torch.equal(pages, before)
        shard.most_fused = most

    for n in (1, 2, 8, 9, 31, 40, 200):
        if n <= most:
            compare(n)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    shard.refresh()
    if most:
        compare(1)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("size, groups, window", [(16, 1, 0), (16, 2, 9), (32, 7, 0), (64, 4, 20), (80, 3, 0)])
def test_tokens_of_a_row_attend_together_as_each_would_alone(size: int, groups: int, window: int) -> None:
    """Rows of 1, 3, 18 and 2 tokens, a padding row, and one whose length alone would make it the row before."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, *range(7, 10), *range(20, 38), 1, 2, 0, 3]
    row = torch.tensor([0] + 3 * [1] + 18 * [2] + 2 * [3] + [4, 5])
    q = torch.randn(len(row), 2 * groups, size, generator=generator)
    k, v = torch.randn(2, 40, 2, 8, size, generator=generator)
    table = torch.randperm(40, generator=generator)[:36].view(6, 6).int()[row]
    args = q, k, v, table, torch.tensor(lengths, dtype=torch.int32)
    torch.testing.assert_close(
        native.paged_decode(*args, window), kernels.paged_decode_torch(*args, window=window), atol=2e-6, rtol=1e-5
    )


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype", native.MOST_ROWS, ids=str)
@pytest.mark.parametrize("size, rows", [(896, 603), (2060, 258), (1100, 18), (64, 50), (16, 16)])
def test_few_rows_are_multiplied_by_weights_as_they_are(size: int, rows: int, dtype: torch.dtype) -> None:
    """Columns of a weight too, as a tensor-parallel rank has them. A row's results do not depend on the others."""
    weight = torch.randn(rows, 2 * size).to(dtype)[:, size:]
    most, tolerance = native.most_rows(weight), 1e-4 if dtype == torch.float32 else 2e-2
    takes_all = most == native.ALL_ROWS
    if takes_all:
        most = 8 if native.has_tiles() else 100  # of more by tiles: the test below
    x = torch.randn(most, size).to(dtype)
    for b in (torch.randn(rows).to(dtype), None):
        alone = torch.cat([native.multiply(row, weight, b) for row in x.split(1)])
        expected = linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(alone.float(), expected, atol=tolerance, rtol=tolerance)
        for n in range(1, most + 1):
            assert native.can_multiply(x[:n], weight, b)
            assert torch.equal(native.multiply(x[:n], weight, b), alone[:n])
    if not takes_all:
        assert not native.can_multiply(torch.randn(most + 1, size).to(dtype), weight, None)
    assert not native.can_multiply(x[:0], weight, None) and not native.can_multiply(x.double(), weight.double(), None)
    assert not native.can_multiply(torch.randn(1, rows).to(dtype), weight.T, None), "not in the order of memory"
    for small in (weight[:15], weight[:, :15]):
        assert not native.can_multiply(x[:1, : small.shape[1]], small, None)


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("size, rows", [(896, 603), (2080, 258), (4864, 288), (288, 2081), (1024, 4200)])
def test_floats_are_multiplied_by_tiles_as_exactly_as_floats_are(size: int, rows: int) -> None:
    """As three bfloat16 each. A row's results do not depend on the others, nor on the number of threads."""
    weight, x, bias = torch.randn(rows, 2 * size)[:, size:], torch.randn(799, size), torch.randn(rows)
    x[:, ::7] *= 1e4
    x[:9] = 0.0
    x[range(9), range(9)] = torch.tensor(
        [0.0, -0.0, 1e-20, -1e30, 1 + 2**-23, 1 - 2**-24, 1 + 2**-7 - 2**-23, 65504, -1]
    )
    for b in (bias, None):
        found, plain = native.multiply(x, weight, b), linear(x, weight, b)
        expected = linear(x.double(), weight.double(), None if b is None else b.double())
        scale = (x.abs() @ weight.abs().T + (0 if b is None else b.abs())).clamp(min=1e-35)  # of the sums' terms
        errors = [float(((each - expected).abs() / scale).max()) for each in (found, plain)]
        assert errors[0] < max(2 * errors[1], 4e-7)
        for n in (9, 15, 16, 17, 32, 33, 48, 64, 65, 128, 255, 256, 257, 530, 768, 769, 799):
            assert native.can_multiply(x[:n], weight, b)
            assert torch.equal(native.multiply(x[:n], weight, b), found[:n])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    of_three = native.multiply(x, weight, None)
    torch.set_num_threads(threads)
    assert torch.equal(of_three, found)


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize(
    "n, size, rows",
    [(9, 96, 64), (70, 1057, 96), (301, 33, 40), (800, 700, 608), (300, 1024, 4200), (3000, 64, 100), (70, 17001, 40)],
)
def test_turned_floats_are_multiplied_by_tiles(n: int, size: int, rows: int) -> None:
    """As a training step has them: a weight in the other order of memory, and both; then `size` is any."""
    x, weight, x_turned, weight_turned = (
        torch.randn(a, b) for a, b in ((n, size), (rows, size), (size, n), (size, rows))
    )
    pairs = [(x_turned.T, weight_turned.T)]
    if size % native.TILE == 0:
        pairs += [(x, weight), (x, weight_turned.T)]
    for a, b in pairs:
        found = native.multiply_turned(a, b)
        assert ((found - a.double() @ b.double().T).abs() / (a.abs() @ b.abs().T)).max() < 4e-7
        assert a is not x or torch.equal(native.multiply_turned(x[:40], b), found[:40])


@needs_tiles
@torch.no_grad()
def test_tiles_take_only_what_they_multiply_right() -> None:
    large, many = torch.randn(1024, 1024), torch.randn(2048, 1024)
    assert all(native.can_turn(x, large) for x in (many, many[:40], many[:9], torch.randn(1024, 2048).T))
    assert not native.can_turn(torch.randn(64, 128, 1024), large) and not native.can_turn(large[0], many)
    assert not native.can_turn(many, large[:, :512]) and not native.can_turn(many, large[:, :512].contiguous())
    assert not native.can_turn(torch.randn(65536, 1), torch.randn(512, 1)), "of one number, and so in both orders"
    x, weight, bias = torch.randn(4096, 64).T, torch.randn(4096, 256).T, torch.randn(256)
    assert native.can_turn(x, weight, bias)
    torch.testing.assert_close(native.multiply_turned(x, weight, bias), linear(x, weight, bias), atol=1e-3, rtol=1e-4)


def test_the_room_for_sums_is_that_of_the_most_rows_by_tiles() -> None:
    tiles = re.findall(r"Lanes sums\[(\d+) \* 16\]", (ROOT / "engine" / "native.cpp").read_text())
    assert [16 * int(groups) for groups in tiles] == [native.TILED_ROWS]


@needs_compiler
@torch.no_grad()
def test_a_packed_weight_multiplies_few_rows_as_it_is() -> None:
    packed = Packed(weight := torch.randn(1024, 1024))
    most = native.MOST_ROWS[torch.float32]
    assert (packed.packed is None) == native.multiplies_all(torch.float32), "else it has a copy, for many rows"
    for n in (0, 1, 2, most, most + 1, 300):
        x = torch.randn(n, 1024)
        torch.testing.assert_close(packed(x, None), x @ weight.T, atol=1e-3, rtol=1e-4)
    x = torch.randn(most, 1024)
    assert torch.equal(packed(x, None), native.multiply(x, weight, None))


@needs_compiler
def test_training_and_other_types_keep_the_operations_of_torch() -> None:
    x = torch.ones(2, 4)
    assert not native.takes(x), "kernels have no backward pass"
    with torch.no_grad():
        assert native.takes(x, None) and not native.takes(x, x.bfloat16()) and not native.takes(x.T)
    assert native.can_decode(torch.empty(1, 64)) and not native.can_decode(torch.empty(1, 20))


@needs_compiler
def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit by bit: so neither on threads, which share rows."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        x, weight, keys, places = randn(64, 512), randn(512), torch.arange(64), torch.arange(64)
        q, (k, v), lengths = randn(64, 4, 16), randn(2, 256, 2, 8, 16), torch.arange(64, dtype=torch.int32) % 32
        table = torch.randperm(256, generator=generator).view(64, 4).int()
        for alone, whole in (
            (kernels.add_rms_norm(x[7:8], None, weight, 1e-6)[0], kernels.add_rms_norm(x, None, weight, 1e-6)[0]),
            (kernels.silu_mul(x[7:8]), kernels.silu_mul(x)),
            (kernels.race(x[7:8], keys[7:8], places[7:8], 1.0)[1], kernels.race(x, keys, places, 1.0)[1]),
            (
                kernels.paged_decode(q[7:8], k, v, table[7:8], lengths[7:8]),
                kernels.paged_decode(q, k, v, table, lengths),
            ),
        ):
            assert torch.equal(alone[0], whole[7])


@needs_compiler
@torch.no_grad()
def test_a_race_takes_rows_apart_and_any_keys(monkeypatch) -> None:
    """As they come from a vocabulary that does not divide into shards; and views of keys."""
    called = names_called(monkeypatch)
    wide, keys, places = torch.randn(9, 300), torch.arange(36) * 77, torch.arange(36)
    args = wide[:, :299], keys[::4], places[::4], 0.7
    (tokens, logprobs), (others, theirs) = kernels.race(*args), kernels.race_torch(*args)
    assert called == {"race"} and torch.equal(tokens, others)
    torch.testing.assert_close(logprobs, theirs, atol=1e-5, rtol=1e-5)


@needs_compiler
@torch.no_grad()
def test_a_run_on_another_device_compiles_nothing(monkeypatch) -> None:
    for name in ("library", "has_tiles"):
        monkeypatch.setattr(native, name, lambda: pytest.fail("looked for kernels"))
    for device in ("cuda", "meta"):
        with FakeTensorMode():
            x, matrix = torch.empty(2, 4, 64, device=device), torch.empty(64, 64, device=device)
            assert not native.takes(x) and not native.fits(x, x) and not native.can_decode(x)
            assert not native.can_attend(x) and not native.can_multiply(matrix, matrix, None)
            assert not native.can_turn(large := torch.empty(1024, 1024, device=device), large, None)
            assert native.most_rows(large) <= max(native.MOST_ROWS.values())


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("compiler", ["", "/no/such/compiler"])
def test_without_a_compiler_torchs_operations_stay(
    compiler: str, tmp_path: Path, model: Model, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None
    assert generate(model)
    assert not [*tmp_path.rglob("*.so")]
    said = capsys.readouterr().out
    assert said.count("\n") == said.count(f"for {compiler} made no kernels: ") == (1 if compiler else 0)


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_says_why_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(native, "SOURCE", "int x = y;")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None and native.library() is None
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith("decodes by torch's operations, which are slower, ") and "error: " in said


@needs_compiler
def test_the_kernels_are_of_the_source_that_was_there_when_python_began(tmp_path: Path) -> None:
    """An upgrade under a running process: other kernels would read these arguments wrongly."""
    for suffix in (".py", ".cpp"):
        (tmp_path / f"native{suffix}").write_text((ROOT / "engine" / f"native{suffix}").read_text())
    spec = spec_from_file_location("before_the_upgrade", tmp_path / "native.py")
    assert spec and spec.loader
    spec.loader.exec_module(before := module_from_spec(spec))
    (tmp_path / "native.cpp").write_text("int x = y;")
    assert before.library()


def where_one_rank_has_no_kernels(world: World) -> None:
    native.library.cache_clear()
    native._compiled = (lambda: None) if world.rank == 1 else native._compiled
    assert (native.library() is None) == (world.rank == 1)
    before = dict(os.environ)
    make_tp_groups(world, [1, 2])
    assert native.library() is None
    native.library.cache_clear()
    assert native.library() is None
    assert os.environ == before, "graders and compilers would inherit it"


@needs_compiler
def test_ranks_decode_by_compiled_kernels_all_or_none(run_ranks) -> None:
    run_ranks(2, where_one_rank_has_no_kernels)


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "plainroll").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(native, "SOURCE", 'extern "C" int made() { return 7; }')
    monkeypatch.setattr(native, "SIGNATURES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (found := native.library()) and found.made() == 7
    [path] = tmp_path.rglob("*.so")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", bytes(len(whole))):
        path.unlink()  # else the process would have the one that it has mapped
        path.write_bytes(damaged)
        native.library.cache_clear()
        assert (found := native.library()) and found.made() == 7


def test_a_rank_that_compiles_in_vain_takes_what_another_has_made(tmp_path: Path, monkeypatch) -> None:
    """Ranks of a replica should compute alike, also where a busy machine lets only some of them be in time."""
    monkeypatch.setenv("CXX", "some-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.subprocess, "run", lambda command, **_: Path(command[-1]).touch())
    made = native._compiled()
    assert made
    whole = made.read_bytes()
    made.unlink()

    def late(command: list[str], **_: object) -> None:
        if is_beside_another:
            made.write_bytes(whole)
        raise native.subprocess.TimeoutExpired(command, 1)

    for is_beside_another in (False, True):
        monkeypatch.setattr(native.subprocess, "run", late)
        assert native._compiled() == (made if is_beside_another else None)


@pytest.mark.skipif(not (can_pack(torch.float32) and torch.backends.mkl.is_available()), reason="another CPU")
@pytest.mark.parametrize(("maker", "capability", "size", "is_packed"), [
    ("GenuineIntel", "AVX2", 511, False), ("GenuineIntel", "AVX2", 512, True), ("AuthenticAMD", "AVX2", 32, True),
    ("AuthenticAMD", "AVX512", 511, False), ("AuthenticAMD", "AVX512", 512, True), ("unknown", "DEFAULT", 32, True),
])  # fmt: skip
def test_small_weights_are_left_to_mkl_where_it_is_faster(
    maker: str, capability: str, size: int, is_packed: bool, monkeypatch
) -> None:
    monkeypatch.setattr(native, "cpu_maker", lambda: maker)
    monkeypatch.setattr(native, "CAPABILITY", capability)
    assert isinstance(cpu.packed(torch.ones(size, 512)), Packed) == is_packed


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_packed_weights_take_few_rows(rows: int, dtype: torch.dtype) -> None:
    """oneDNN gets at least four, or none; the caller sees its own."""
    weight, bias, x = (torch.randn(shape, dtype=dtype) for shape in ((1024, 1024), (1024,), (rows, 1024)))
    close = dict(atol=3e-4, rtol=0) if dtype == torch.float32 else dict(atol=0.01, rtol=0.01)
    torch.testing.assert_close(Packed(weight)(x, bias), linear(x, weight, bias), **close)


def test_sizes_of_steps_with_drafts_are_few() -> None:
    sizes = [few_sizes(rows) for rows in range(1, 4097)]
    assert all(rows <= size < rows * 17 / 16 for rows, size in enumerate(sizes, 1))
    assert sizes[:32] == [*range(1, 33)] and len({*sizes}) < 150 and all(few_sizes(size) == size for size in sizes)


def test_bfloat16_is_packed_where_the_cpu_has_it(monkeypatch) -> None:
    """Elsewhere oneDNN emulates it: a fifth of the speed of float32."""
    can = can_pack.__wrapped__
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found={"avx512_bf16": has}: found)
        assert can(torch.bfloat16) == has and can(torch.float32) and not can(torch.float64)
