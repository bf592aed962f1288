"""Decoding with vLLM, run by a Python that has it: it shares no package with this one.

    PYTHON benchmarks/vllm_decoding.py MODEL_FOLDER < REQUEST_JSON

The request holds ``prompts`` (token ids), ``lengths``, ``batch`` and ``pairs``; the answer is a line of JSON with the
seconds of each run behind one that warms up. float32, eager, as vLLM runs on a CPU without a compiler.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) for prompt in request["prompts"]) + max(request["lengths"])
    model = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, max_num_seqs=request["batch"], max_model_len=longest,
        enable_prefix_caching=False, gpu_memory_utilization=0.4,  # on a CPU: share of the memory, for keys and values
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    params = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True) for length in request["lengths"]]
    seconds = []
    for _ in range(request["pairs"] + 1):
        began = time.perf_counter()
        answers = model.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        sampled = sum(len(answer.outputs[0].token_ids) for answer in answers)
        if sampled != sum(request["lengths"]):
            raise AssertionError(f"sampled {sampled} tokens, not {sum(request['lengths'])}")
    print(json.dumps({"seconds": seconds[1:]}), file=wire, flush=True)


if __name__ == "__main__":
    main()
