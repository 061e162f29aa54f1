"""How fast the GPU decodes: what the host does meanwhile, tokens per second, and transformers beside it."""

import gc
import statistics
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_checks import CUT, GREEDY, MODELS, PLAIN, SMALL, FusedEngine, build, pool_gib
from gpu_rows import Section, measure_bandwidth, seconds_of, wait

from engine.batcher import Started
from engine.flights import Flight
from engine.pages import pages_needed
from engine.sequence import Sequence
from model import Model
from rollout import Engine, RolloutConfig, cache_of
from sampling import SamplingConfig, sample_key

LIMIT = 64  # response tokens of a timed row, at most


def decode_engine(model: Model, pages: int, rows: int, context: int, sampling: SamplingConfig = PLAIN) -> Engine:
    config = RolloutConfig(max_prompt_tokens=context - LIMIT, max_response_tokens=LIMIT, max_running=rows)
    dtype = model.embed.weight.dtype
    return FusedEngine(model, replace(config, kv_gib=pool_gib(model.shape, config, dtype, pages)), sampling, [])


def occupy(engine: Engine, rows: int, context: int) -> None:
    """Have `rows` sequences decode, up to `context` tokens, without prefill: time does not ask what the cache holds."""
    engine.abort([s.id for s in engine.batcher.running])  # of a case that failed
    prompt = (5,) * (context - LIMIT)
    sequences = [Sequence(i, 0, 0, prompt, sample_key(i), LIMIT, ignore_eos=True) for i in range(rows)]
    for s in sequences:
        for _ in range(pages_needed(len(prompt), engine.pages.page_size)):
            engine.pages.take(s)
    started = Started(sequences=sequences)
    engine.batcher.seat(started)
    engine.runner.start(started)


def vacate(engine: Engine) -> None:
    engine.abort([s.id for s in engine.batcher.running])
    assert engine.pages.used == 0


def release(s: Section) -> None:
    """Give the memory of deleted engines back: they are parts of reference cycles."""
    gc.collect()
    if s.on_gpu:
        torch.cuda.empty_cache()


def step_seconds(engine: Engine, steps: int) -> float:
    wait(engine.device)
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait(engine.device)
    return (time.perf_counter() - start) / steps


def graph_seconds(engine: Engine) -> float:
    """Seconds of the step on the device alone. Spoils the state of the rows."""
    n, graphs = len(engine.batcher.running), engine.runner.graphs
    assert graphs

    @torch.inference_mode()
    def five() -> None:
        for _ in range(5):
            graphs.run(engine.runner.decode_step, n)

    return seconds_of(five, engine.device, turns=1) / 5


def section_steps(s: Section) -> None:
    """What the host does in a decode step: waits, and time beside the device's."""
    c = MODELS["0.5B"] if s.on_gpu else SMALL
    model = build(c, s.device, torch.bfloat16 if s.on_gpu else torch.float32)
    rows, context = (32, 1024) if s.on_gpu else (3, 128)
    most, pages = (256 if s.on_gpu else 4), (256 if s.on_gpu else 4) * (context // 64)
    engine = decode_engine(model, pages, most, context)
    if s.on_gpu:
        with s.guard("host syncs"):
            occupy(engine, rows, context)
            step_seconds(engine, 4)
            report_syncs(s, f"50 decode steps, {rows} rows", count_syncs(engine, 50), 50, "host_syncs_per_step")
            vacate(engine)
        with s.guard("host syncs of a prefill"):
            occupy(engine, rows, context)
            step_seconds(engine, 4)
            count_prefill(engine, 100)  # compile
            report_syncs(s, "steps with a prefill beside", count_prefill(engine, 200), 4, "host_syncs_per_prefill_step")
            vacate(engine)
        with s.guard("CUDA calls"):
            occupy(engine, rows, context)
            step_seconds(engine, 4)
            report_calls(s, engine, 16)
            vacate(engine)
    else:
        s.skip("host syncs", "needs a GPU")
    for n in s.in_time((1, 32, 256) if s.on_gpu else (1, 4)):
        with s.guard(f"host time, {n} rows"):
            host_time(s, engine, n, context)
    del engine
    release(s)
    for n, sampling in s.in_time([(n, x) for n in ((32, 256) if s.on_gpu else (4,)) for x in (PLAIN, CUT)]):
        name = f"sampling {'plain' if sampling is PLAIN else 'with top-k and top-p'}, {n} rows"
        with s.guard(name):
            engine = decode_engine(model, pages, most, context, sampling)
            occupy(engine, n, context)
            step_seconds(engine, 4)
            s.row(name, f"{1000 * min(step_seconds(engine, 8) for _ in range(3)):.2f} ms/step")
            del engine
            release(s)


def host_time(s: Section, engine: Engine, n: int, context: int) -> None:
    """Time of a step less what `Flight.land` waits for the device."""
    occupy(engine, n, context)
    step_seconds(engine, 4)
    waited, land = 0.0, Flight.land

    def timed(flight: Flight) -> list:
        nonlocal waited
        start = time.perf_counter()
        if flight.event:
            flight.event.synchronize()
        waited += time.perf_counter() - start
        return land(flight)

    with patch.object(Flight, "land", timed):
        seconds = step_seconds(engine, 24)
    host, device = seconds - waited / 24, graph_seconds(engine)
    text = f"host {1000 * host:.3f} ms, device {1000 * device:.3f} ms, together {1000 * seconds:.3f} ms"
    case = f"host time, {n} rows of {context}"
    metrics = {f"host_ms_b{n}": round(1000 * host, 4), f"device_ms_b{n}": round(1000 * device, 4)}
    if s.on_gpu:
        s.aim(case, text, host < device, "host < device", **metrics)
    else:
        s.row(case, text, **metrics)
    vacate(engine)


def count_syncs(engine: Engine, steps: int) -> Counter:
    """Return where torch made the host wait for the device, by its own account, in `steps` steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in caught if "called a synchronizing" in str(w.message)]
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in syncs)


def count_prefill(engine: Engine, first: int) -> Counter:
    """As `count_syncs`, over four steps that each admit a new prompt of 200 tokens."""
    counts: Counter = Counter()
    for i in range(first, first + 4):
        engine.add(Sequence(i, 1, 0, (i,) * 200, sample_key(i), 40, ignore_eos=True))
        counts += count_syncs(engine, 1)
    return counts


def report_syncs(s: Section, case: str, places: Counter, steps: int, metric: str) -> None:
    total = sum(places.values())
    text = f"{total} host syncs" + "".join(f", {count} at {place}" for place, count in places.most_common(4))
    good = total == 0 if metric == "host_syncs_per_step" else None
    s.row(case, text, good, "0 besides the flags' event", **{metric: total / steps})


def report_calls(s: Section, engine: Engine, steps: int) -> None:
    """Count calls of the CUDA runtime, as the profiler sees them."""
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            engine.step()
    counts = {e.key: e.count / steps for e in profile.key_averages() if e.key.startswith("cu")}
    if not counts:
        return s.skip("CUDA calls of a step", "the profiler saw none")
    # Stopping the profiler waits once or twice itself.
    unwanted = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaHostAlloc", "cudaFree")
    good = all(counts.get(name, 0) < 0.5 for name in unwanted)
    often = sorted((-count, name) for name, count in counts.items() if count >= 0.2)
    text = ", ".join(f"{name} {-count:.1f}" for count, name in often)
    s.row("CUDA calls of a step", text, good, "waits for no stream, allocates nothing")


CASES = [(rows, context) for context in (256, 2048, 8192) for rows in (1, 8, 32, 128, 256)]
PROFILED = {("0.5B", 1, 256), ("0.5B", 256, 2048), ("7B", 32, 2048), ("7B", 128, 2048), ("1.5B", 32, 8192)}


def section_decode(s: Section) -> None:
    """Tokens per second of decoding alone; the share of the memory's bandwidth that weights and KV, read once, take."""
    bandwidth = 1e9 * s.known.get("bandwidth_gbs", 0.0) or measure_bandwidth(s.device)
    fractions: list[float] = []
    for name in s.in_time(("7B", "0.5B", "1.5B") if s.on_gpu else ("small",)):
        with s.guard(name):
            model = build(MODELS.get(name, SMALL), s.device, torch.bfloat16 if s.on_gpu else torch.float32)
            cases = CASES if s.on_gpu else [(1, 128), (4, 128)]
            free = 0.93 * torch.cuda.mem_get_info()[0] - 1.5 * 2**30 if s.on_gpu else 2**28
            page = cache_of(RolloutConfig(), model.shape, model.embed.weight.dtype).page_bytes(1)
            pages = int(min(max(n * -(-context // 64) for n, context in cases), free // page))
            engine = decode_engine(model, pages, max(n for n, _ in cases), max(context for _, context in cases))
            for rows, context in s.in_time(cases):
                if rows * -(-context // 64) > pages:
                    s.skip(f"{name}, {rows} rows of {context}", "does not fit into memory")
                    continue
                with s.guard(f"{name}, {rows} rows of {context}"):
                    fractions += decode_case(s, name, engine, rows, context, bandwidth)
            del engine, model
            release(s)
    if fractions:
        worst = min(fractions)
        s.row("7B, 32 rows and more", f"{worst:.0%} of the bandwidth at least", decode_fraction_7b=round(worst, 3))


def decode_case(s: Section, name: str, engine: Engine, rows: int, context: int, bandwidth: float) -> list[float]:
    model = engine.model
    occupy(engine, rows, context)
    step_seconds(engine, 4)
    seconds = min(step_seconds(engine, 10) for _ in range(3))
    device = f", device {1000 * graph_seconds(engine):.3f}"
    weights = sum(p.nbytes for p in model.parameters()) - (0 if model.head is None else model.embed.weight.nbytes)
    token = cache_of(engine.config, model.shape, engine.runner.memory.dtype).page_bytes(1) / engine.config.page_size
    share = (weights + rows * (context - LIMIT + 20) * token) / seconds / bandwidth
    text = f"{1000 * seconds:.3f} ms/step{device}, {rows / seconds:,.0f} tokens/s, {share:.0%} of the bandwidth"
    key = f"{name}_b{rows}_c{context}"
    metrics = {f"tokens_s_{key}": round(rows / seconds), f"fraction_{key}": round(share, 3)}
    goal = 0.7 if context >= 8192 else 0.8 if name == "7B" and rows >= 32 else 0.0
    case = f"{name}, {rows} rows of {context}"
    if goal and s.on_gpu:
        s.aim(case, text, share >= goal, f"{goal:.0%}", **metrics)
    else:
        s.row(case, text, **metrics)
    vacate(engine)
    if (name, rows, context) in PROFILED:
        with s.guard(f"{case}: profile"):
            profile_case(s, case, engine, rows, context)
    return [share] if name == "7B" and rows >= 32 else []


KINDS = {  # part of a kernel's name -> what it is for
    **dict.fromkeys(("_paged_decode", "_merge_splits"), "attention"),
    **dict.fromkeys(("nvjet", "gemm", "cutlass", "gemv", "splitk"), "matrix products"),
    **dict.fromkeys(("_block_masses", "_race"), "sampling"),
    **dict.fromkeys(("memcpy", "memset"), "copies"),
    "_rms_norm": "norms",
    "_rope_and_write": "rope and KV write",
    "_silu_mul": "silu",
}


def profile_case(s: Section, case: str, engine: Engine, rows: int, context: int) -> None:
    """Say which kernels the device's time goes to."""
    occupy(engine, rows, context)
    step_seconds(engine, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step_seconds(engine, 8)
    vacate(engine)
    spent: Counter = Counter()
    for event in profile.key_averages():
        kind = next((kind for part, kind in KINDS.items() if part in event.key.lower()), "torch's small kernels")
        spent[kind] += event.self_device_time_total / 8
    spent = Counter({kind: us for kind, us in spent.items() if us})
    if not spent:
        return s.skip(f"{case}: profile", "the profiler saw no kernels")
    total = sum(spent.values())
    s.row(f"{case}: profile", ", ".join(f"{kind} {us:.0f} us ({us / total:.0%})" for kind, us in spent.most_common()))


# ---- transformers -----------------------------------------------------------------------------------------------


def section_generate(s: Section) -> None:
    """Equal lengths, greedy, the same weights: transformers' `generate` with its static cache, which it compiles."""
    tokens, prompt = (128, 16) if s.on_gpu else (6, 8)
    for name, rows in s.in_time((("0.5B", 1), ("0.5B", 32), ("1.5B", 32)) if s.on_gpu else (("small", 2),)):
        case = f"{name}, {rows} rows, {tokens} tokens"
        with s.guard(case):
            release(s)
            torch._dynamo.reset()  # else the second shape is compiled for any shape
            c, dtype = MODELS.get(name, SMALL), torch.bfloat16 if s.on_gpu else torch.float32
            ours = build(c, s.device, dtype)
            theirs = in_transformers(ours, c).eval()
            speed, agree = race(ours, theirs, rows, prompt, tokens)
            ratio = speed["ours"] / speed["theirs"]
            text = f"ours {speed['ours']:,.0f} tokens/s, theirs {speed['theirs']:,.0f}: {ratio:.2f} x"
            metrics = {f"ratio_generate_{name}_b{rows}": round(ratio, 2)}
            s.row(case, f"{text}; {agree:.0%} of first tokens equal", **metrics)


def in_transformers(ours: Model, c: dict) -> Any:
    """Return transformers' model of the shape `c`, with the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device(ours.embed.weight.device):
        theirs = Qwen2ForCausalLM._from_config(Qwen2Config(**c), dtype=ours.embed.weight.dtype)
    theirs.load_state_dict(ours.export(), strict=False)
    theirs.tie_weights()
    return theirs


def race(ours: Model, theirs: Any, rows: int, prompt: int, tokens: int) -> tuple[dict[str, float], float]:
    """Return tokens per second of both and the share of rows whose first tokens agree."""
    ids = torch.randint(5, 250, (rows, prompt), generator=torch.Generator().manual_seed(0))
    config = RolloutConfig(max_prompt_tokens=prompt, max_response_tokens=tokens, max_running=rows, kv_gib=2.0)
    engine, given = FusedEngine(ours, config, GREEDY, []), ids.to(ours.embed.weight.device)
    options = dict(do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None)

    def run_theirs() -> list[list[int]]:
        mask = torch.ones_like(given)
        out = theirs.generate(given, attention_mask=mask, cache_implementation="static", **options)
        return out[:, prompt:].tolist()

    def run_ours() -> list[list[int]]:
        return [list(group[0].token_ids) for group in engine.generate(ids.tolist())]

    speed, made = {}, {}
    for side, run in {"ours": run_ours, "theirs": run_theirs}.items():
        times = []
        for _ in range(5):
            start = time.perf_counter()
            made[side] = run()
            times.append(time.perf_counter() - start)
        speed[side] = rows * tokens / min(times[2:])  # the first two compile and capture
    assert [len(x) for x in made["theirs"]] == [tokens] * rows, "generate stopped early"
    return speed, statistics.mean(a[0] == b[0] for a, b in zip(made["ours"], made["theirs"]))
