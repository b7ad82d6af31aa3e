"""Every option of `conf/`, and what some of them need to be made: small files, inner workloads, other options."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from conftest_app import ROOT
from omegaconf import DictConfig, OmegaConf

from mcjax.app.build import workload_of
from mcjax.app.compose import compose, made
from mcjax.app.mistakes import locate
from mcjax.cost.measured import Copies, Line, Machine, Overheads, Sizes, write
from mcjax.cost.measurements import Measurement, write_csv

CONF = ROOT / "src" / "mcjax" / "conf"
FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml"))
OPTIONS = [file.removesuffix(".yaml") for file in FILES if "/" in file]

STEPS = [
    *(Measurement("prefill", start, length, 0, 0, 0.001) for start in (0, 384) for length in (16, 128)),
    *(Measurement("decode", 0, 0, batch, batch * context, 0.001) for batch in (1, 4) for context in (0, 500)),
]
"""Enough for `cost=table` and `cost=measured`."""

MACHINE = Machine(
    hardware="cpu",
    model="builtin-tiny",
    sizes=Sizes(
        pages=64,
        page_tokens=32,
        max_batch=4,
        chunk_tokens=128,
        max_context_tokens=1024,
        pool_blocks=256,
        shares_decoded=False,
    ),
    steps=tuple(STEPS),
    slowdown={"prefill": {"decode": 1.5}, "decode": {"prefill": 1.25}},
    copies=Copies(Line(100, 10), Line(200, 20), Line(50, 5)),
    overheads=Overheads(400, 300, 200, 100, (0.5, 1.0)),
    spread={},
    notes={},
)

SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
MOONCAKE = {"timestamp": 0, "input_length": 1200, "output_length": 8, "hash_ids": [0, 1, 2]}
CALL = {"t": 0, "type": "s", "model": "m", "in": 8, "out": 3, "hash_ids": [1, 2]}
BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [3, 4, 5],
}
TEXTS: dict[str, str] = {
    "shape/config.json": json.dumps(SHAPE),
    "mooncake.jsonl": json.dumps(MOONCAKE),
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59,513,10",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,4,8,12,API log",
    "bailian.jsonl": json.dumps(BAILIAN),
    "jsonl.jsonl": json.dumps({"arrival_s": 0.5, "input_tokens": 600, "output_tokens": 9}),
    "aiperf.jsonl": json.dumps({"session_id": "a", **MOONCAKE}),
    "weka.jsonl": json.dumps(
        {"id": "c", "models": ["m"], "block_size": 4, "hash_id_scope": "local", "requests": [CALL]}
    ),
    "servegen/chunk-1-trace.csv": "0,1.0,1.0,Gamma,1.0,1.0",
    "servegen/chunk-1-dataset.json": json.dumps({"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 1.0}"}}),
}


def write_needed(folder: Path) -> None:
    """The files that options read."""
    for inner in ("servegen", "shape"):
        (folder / inner).mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(f"{text}\n")
    write(MACHINE, folder / "measured.json")
    write_csv(str(folder / "measurements.csv"), STEPS, "made up")
    _write_gguf(folder / "small.gguf")


def _write_gguf(path: Path) -> None:
    """What says a shape: metadata, and the embeddings' size."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((32, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def overrides_for(option: str, folder: Path) -> list[str]:
    """What composes an option that can be made; `folder` holds the files of `write_needed`."""
    group, _, name = option.rpartition("/")
    files = {Path(file).stem: str(folder / file) for file in TEXTS if "/" not in file}
    files["servegen"] = str(folder / "servegen")
    needs = {
        "cost/fitted": ["hardware=a800x8", "model=llama3-70b"],
        "cost/table": [f"cost.path={folder / 'measurements.csv'}"],
        "cost/measured": [f"cost.path={folder / 'measured.json'}"],
        "cost/aiconfigurator": ["hardware=h100x8", "model=qwen3-32b"],
        "model/gguf": [f"model.path={folder / 'small.gguf'}"],
        "model/hf": [f"model.path={folder / 'shape'}"],
        "workload/slice": [f"workload.of.path={files['mooncake']}"],
        "workload/reblocked": [f"workload.of.path={files['mooncake']}"],
        "workload/superposed": ["+workload@workload.parts.one=chat"],
    }
    if group == "workload" and name in files:
        needs[option] = [f"workload.path={files[name]}"]
    own = [f"{group.replace('/', '.')}._target_=builtins.dict"] if name == "custom" else []
    return [f"{group}={name}", *needs.get(option, []), *own]


def group_key(option: str) -> str:
    """Where the config has the option's section."""
    return option.rpartition("/")[0].replace("/", ".")


@functools.cache
def composed(option: str, folder: Path) -> DictConfig:
    """The config that the option makes of the defaults. Not to be changed."""
    return compose(overrides_for(option, folder))


def make(option: str, config: DictConfig) -> Any:
    """What the option's section becomes, or None for one that nothing is made of, beside the strategies in it."""
    key = group_key(option)
    section = OmegaConf.select(config, key)
    if key == "experiment":
        return None
    if "_target_" not in section:
        for name, inner in section.items():
            if isinstance(inner, DictConfig) and "_target_" in inner:
                made(config, f"{key}.{name}")
        return None
    if key == "backend":
        return locate("backend", section["_target_"])
    return workload_of(config) if key == "workload" and option != "workload/custom" else made(config, key)
