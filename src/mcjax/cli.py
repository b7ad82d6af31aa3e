"""The `mcjax` command: help at once, sub-commands by name, and everything else to Hydra."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

HELP = """\
mcjax: KVCache-centric, disaggregated LLM inference: run it, simulate it, check it.

  mcjax                             the demo: a real prefill and a real decode instance on this machine
  mcjax GROUP=OPTION key=value ...  any other run; -m sweeps over comma-separated values
  mcjax chat model=smollm2          talk to a model in the terminal
  mcjax -m GROUP=A,B +slices=8 ...  a sweep: every combination, over seeds (+seeds=10) or stretches of the trace
  mcjax compare RUNS...|SWEEP       groups of runs side by side, with intervals of their differences
  mcjax diff RUN RUN                config, environment, first differing decision and token
  mcjax plot RUNS... kind=KIND      a figure for a paper, its numbers beside it; kinds: mcjax plot --help
  mcjax report SWEEP|RUNS...        one self-contained HTML page
  mcjax trace RUN                   a run, or one request of it, as a trace for Perfetto
  mcjax ls [FILTER...]              the runs there are, and what differs between them
  mcjax rerun RUN                   repeat one exactly, and say whether it agrees
  mcjax prune                       what may go, by state, age, number or size
  mcjax explain RUN REQUEST         one request's timeline, and what each of its decisions chose among
  mcjax replay RUN                  decide a run's decisions again from its own log
  mcjax pool inspect|verify DIR     an SSD tier: what lies in it, and whether every block is whole
  mcjax config [GROUP]              groups, options and keys: default, what it takes, what it is
  mcjax workload NAME_OR_TRACE ...  what a workload is made of, and how much hardware it keeps busy
  mcjax kernels model=M hardware=H  each attention kernel's limit, what binds it, and what was achieved
  mcjax convert SRC DST             a model's files in another form: GGUF, safetensors, Orbax
  mcjax fit MEASUREMENTS            a cost=fitted from measured steps
  mcjax train-tiny [DIR]            the built-in model and its draft, trained again on this machine
  mcjax validate [key=value ...]    the simulator against the real engine on this machine
  mcjax figures                     the published figures again: ours, published, difference
  mcjax --cfg job ...               print the config of a run without running it

Worlds     backend=jax       the real engine (default)
           backend=sim       virtual time on cost models
           backend=check     byte-true blocks under injected faults: faults=none|random
Cluster    cluster=1p1d|8p8d|16m|2p2d+1m
Policies   sched/prefill=random|round_robin|least_loaded|cache_aware|kvcache_centric|custom
           sched/batching=prefill_first|chunked      sched/admission=none|early_rejection
           sched/decode, sched/fetch, sched/tenancy, sched/roles, kvpool/eviction, kvpool/watermark
Traffic    workload=chat|synthetic|text    slo=relative|paper|none
           workload=text|mooncake|azure|servegen|burstgpt|bailian|jsonl|weka|aiperf (workload.path=FILE)
           workload=slice|superposed|reblocked (made of others)
Machines   hardware=a800x8|h800x8|h100x8|h200x8|tpu_v5e_8|tpu_v6e_8|tpu_v7x_8|cpu
Models     model=tiny|tiny-draft|smollm2   model=hf model.path=DIRECTORY   model=gguf model.path=FILE
           model=llama3-8b|llama3-70b|qwen2.5-7b|qwen3-32b|qwen3-30b-a3b|mistral-7b|mixtral-8x7b
           model=gemma3-27b|deepseek-v3|kimi-k2
           cost=auto|fitted|roofline|table|measured|aiconfigurator
Tracking   track=files|wandb|tensorboard|none
Studies    experiment=tiers|mooncake_8p8d|mooncake_16m|prefill_selections|fast25_prefill_only|fast25_figure5

  mcjax backend=sim workload=mooncake workload.path=FILE cluster=8p8d hardware=a800x8 model=llama3-70b
  mcjax backend=check faults=random seed=1
  mcjax backend=sim sched/prefill=custom sched.prefill._target_=my_policy.Mine   (my_policy.py lies here)

Exit status: 0 done, 1 the run failed, 2 it cannot be run as asked, 130 interrupted (what there was is kept).
debug=true shows tracebacks for mistakes too. --info and --hydra-help are Hydra's own.
"""


COMMANDS = {
    "chat": "mcjax.app.chat",
    "replay": "mcjax.app.replay",
    "pool": "mcjax.app.pool.command",
    "config": "mcjax.app.config",
    "ls": "mcjax.app.ls",
    "rerun": "mcjax.app.rerun",
    "prune": "mcjax.app.prune",
    "trace": "mcjax.app.trace",
    "compare": "mcjax.app.compare",
    "diff": "mcjax.app.diff",
    "plot": "mcjax.app.plot",
    "report": "mcjax.app.report",
    "explain": "mcjax.app.explain",
    "workload": "mcjax.app.workload_report",
    "kernels": "mcjax.app.kernels.command",
    "convert": "mcjax.app.convert",
    "fit": "mcjax.app.fit",
    "train-tiny": "mcjax.app.train_tiny",
    "validate": "mcjax.app.validate",
    "figures": "mcjax.app.figures.page",
}
"""Each module has `command(arguments) -> exit status`, and is imported when it is asked for."""


def _command(name: str, arguments: Sequence[str]) -> int:
    sys.path.insert(0, os.getcwd())  # a run may have used a strategy that lies here
    try:
        status: int = importlib.import_module(COMMANDS[name]).command(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("mcjax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mcjax explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return 0


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if arguments and arguments[0] in ("--version", "-V"):
        from mcjax import __version__

        print(f"mcjax {__version__}")
        return
    if arguments and arguments[0] in COMMANDS:
        raise SystemExit(_command(arguments[0], arguments[1:]))
    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] and arguments[0][:1] not in "+~":
        print(f"mcjax: no command {arguments[0]!r}; there is {', '.join(COMMANDS)}. See mcjax --help", file=sys.stderr)
        raise SystemExit(2)
    try:
        from mcjax.app.command import main as run

        status = run(arguments)
    except KeyboardInterrupt:  # while still importing
        status = 130
    raise SystemExit(status)


if __name__ == "__main__":
    main()
