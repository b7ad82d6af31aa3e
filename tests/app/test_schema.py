"""What may stand for each key of each option, and which values exclude each other: refused before anything is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from conf_options import OPTIONS, composed, group_key, make
from conftest_app import SIM, SMALL, Answer, runs
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import mcjax as package
from mcjax.app.build import track_settings
from mcjax.app.compose import compose, plain_of
from mcjax.app.schema.check import check, check_kinds, check_value, kinds_of
from mcjax.app.schema.kinds import Bounds, described, fits
from mcjax.app.schema.sections import BACKENDS, SECTIONS, JaxBackend, Kernels, Root
from mcjax.app.schema.together import UNREAD_BY_CHECK
from mcjax.backends.jax.numerics import NUMERICS
from mcjax.errors import ConfigError, UserError
from mcjax.kernels.choice import NAMES

Command = Callable[..., Answer]

WALKED = [name for name in OPTIONS if not name.startswith(("experiment/", "hydra/")) and not name.endswith("/custom")]

WALKED_ALWAYS = ("backend/jax", "backend/sim", "workload/synthetic", "sched/prefill/kvcache_centric", "track/wandb")
"""The others take their time."""

NEGATIVE = ("priority", "urgent", "presence_penalty", "frequency_penalty")
"""Last parts of keys whose numbers may be below 0."""

NULL = {"backend.compilation_cache", "workload.rate_per_s", "model.dtype_bytes", "model.kv_dtype_bytes"}
"""Keys whose default is no null, and that take one: their comments say what it means."""

LISTS = {"backend.prefill_widths", "backend.decode_batches"}
"""Keys whose default is a word, and that take a list of numbers too."""


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every key below, with its default; what another group fills in is not this one's."""
    if key == "model.config":  # a config.json, whose fields tests/cost/test_families.py gets wrong
        return
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            other_group = key in ("sched", "kvpool") and isinstance(inner, Mapping)
            if not str(name).startswith("_") and not other_group:
                yield from leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{key}[{index}]")
    elif not (isinstance(value, str) and value.startswith("${")):
        yield key, value


def wrong_for(key: str, default: Any) -> list[Any]:
    """Values that cannot stand for a key with this default."""
    last = key.rpartition(".")[2]
    if isinstance(default, bool):
        wrong: list[Any] = ["text", 7, [1], None]
    elif isinstance(default, int | float):
        wrong = ["text", [1], True, *([] if last in NEGATIVE else [-1]), None]
    elif isinstance(default, str):
        wrong = [7, *([] if key in LISTS else [[1]]), None]
    elif default is None:
        wrong = [[], -1, {"a": 1}]
    else:
        wrong = ["text", -1, None]
    return [value for value in wrong if value is not None or key not in NULL]


def put(section: Any, path: str, value: Any) -> None:
    """Set a key of plain values: `track.sinks[0].directory`."""
    *outer, last = path.replace("[", ".").replace("]", "").split(".")
    for name in outer:
        section = section[int(name)] if isinstance(section, list) else section[name]
    section[last] = value


def refusal_of(option: str, config: DictConfig, plain: dict[str, Any], path: str, wrong: Any) -> str:
    """What is said against `wrong` (`plain` has it, `config` has not) before anything runs; "" if nothing is."""
    kept = OmegaConf.select(config, path)
    try:
        check_kinds(plain)
        OmegaConf.update(config, path, wrong, merge=False)
        track_settings(config) if option.startswith("track/") else make(option, config)
    except UserError as problem:
        return str(problem)
    finally:
        OmegaConf.update(config, path, kept, merge=False)
    return ""


@pytest.mark.parametrize(
    "option",
    [name if name in WALKED_ALWAYS else pytest.param(name, marks=pytest.mark.check_long) for name in WALKED],
)
def test_wrong_values_of_every_key_are_refused(option: str, needed: Path) -> None:
    """By the declared kinds; or, since some bounds are the business of the class, when it is made."""
    config = copy.deepcopy(composed(option, needed))
    plain = plain_of(config)
    key = group_key(option)
    declared = OmegaConf.to_container(OmegaConf.select(config, key), resolve=False)
    for path, default in leaves(declared, key):
        kept = default if path.rpartition(".")[2] != "path" else OmegaConf.select(config, path)
        for wrong in wrong_for(path, default):
            put(plain, path, wrong)
            assert path in refusal_of(option, config, plain, path, wrong), f"{path}={wrong} is told by its key"
        put(plain, path, kept)
    check_kinds(plain)


def test_wrong_values_of_the_root_are_refused() -> None:
    plain = plain_of(compose(["backend=sim"]))
    own = {name: value for name, value in plain.items() if name in kinds_of(Root) or name == "engine"}
    keys = list(leaves(own, ""))
    assert len(keys) > 15
    for path, default in keys:
        if path in ("question", "cluster_changes"):
            continue
        for wrong in wrong_for(path, default):
            changed = copy.deepcopy(plain)
            put(changed, path, wrong)
            with pytest.raises(ConfigError, match=rf"^{path}="):
                check(changed)


def test_every_plain_key_of_conf_is_declared(needed: Path) -> None:
    """Nothing is declared that `conf/` does not have, and nothing there that is not declared."""
    for world, section in BACKENDS.items():
        there = {name for name in compose([f"backend={world}"]).backend if not name.startswith("_")}
        assert there == set(kinds_of(section))
    config = compose([])
    for key, section in SECTIONS.items():
        plain = {name for name in config[key] if not config[key][name] or not OmegaConf.is_dict(config[key][name])}
        assert plain == set(kinds_of(section))  # a mapping that is empty there is a user's to fill
    own = {name for name in config if not OmegaConf.is_dict(config[name])}
    assert own == set(kinds_of(Root))


def test_words_of_the_schema_are_those_of_the_mechanisms() -> None:
    assert kinds_of(JaxBackend)["numerics"] == Literal[NUMERICS]
    for key, kind in kinds_of(Kernels).items():
        words = kind if key == "pages" else kind.__args__[0]  # or a mapping
        assert words == Literal[NAMES[key]]


REFUSED = [
    (["slice=1"], ["slice=1", "below slices=1"]),
    (["slices=4", "slice=4"], ["slice=4", "below slices=4"]),
    (["slices=1000"], ["slice=0", "no session starts in this one of slices=1000"]),
    (["+engine.leese_s=1"], ["engine.leese_s=1", "did you mean lease_s"]),
    (["+sede=1"], ["sede=1", "did you mean seed"]),
    (["+sched.prefil={_target_: my_policy.Mine}"], ["sched.prefil", "did you mean"]),
    (["~engine.lease_s"], ["engine.lease_s", "needs a value"]),
    (["seed=1e3"], ["seed=1000", "a whole number, 0 or more"]),
    (["cluster={prefill: true, decode: 1}"], ["cluster.prefill=True"]),
    (["sched.report_period_s=1e-12"], ["sched.report_period_s", "1e-06 or more"]),
    (["engine.lease_s=.inf"], ["engine.lease_s", "seconds"]),
    (["engine.lease_s=.nan"], ["engine.lease_s", "seconds"]),
    (["engine.preemption=recompute"], ["engine.preemption=recompute", "engine.headroom_tokens"]),
    (["engine.preemption=drop"], ["engine.preemption=drop", "one of swap, recompute"]),
    (["kernels.prefill=flash"], ["kernels.prefill=flash", "one of xla, pallas, reference, or a mapping"]),
    (["+kernels.attention=xla"], ["kernels.attention=xla", "there is no such key", "prefill, decode, kv_pack, pages"]),
    (["kernels.decode=pallas"], ["kernels.decode=pallas", "pages=tokens_first", "kernels.pages=heads_first"]),
    (["kernels=pallas", "kernels.pages=tokens_first"], ["kernels.prefill=pallas", "kernels.pages=heads_first"]),
    (["kernels.prefill={_target_: mcjax.kernels.pallas.Prefil}"], ["kernels.prefill._target_", "did you mean Prefill"]),
    (["kernels.decode={target: mine.attention}"], ["kernels.decode", "needs a _target_"]),
    (["kernels.decode={_target_: math.hypot2}"], ["kernels.decode._target_=math.hypot2", "math has no hypot2"]),
    (
        ["kernels.decode={_target_: json.dumps}"],
        ["kernels.decode=json.dumps", "must take (queries, keys"],
    ),
    (["kernels.kv_pack={_target_: json.JSONDecoder}"], ["kernels.kv_pack", "methods pack and unpack"]),
    (["backend.noise=2"], ["backend.noise=2", "0 to 1"]),
    (["sched/lengths=constant", "sched.lengths.tokens=0"], ["sched.lengths.tokens=0"]),
    (["workload.block_tokens=-3"], ["workload.block_tokens=-3"]),
    (["kvpool.dram_bytes=0"], ["kvpool.dram_bytes=0", "a whole number of bytes, 1 or more, or null"]),
    (["track.level=everything"], ["track.level=everything"]),
    (["model.layers=many"], ["model.layers=many", "a whole number"]),
    (
        ["workload=superposed", "+workload@workload.parts.one=synthetic", "workload.parts.one.sessions=0"],
        ["workload.parts.one.sessions=0"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda value: " ".join(value))
def test_refused_before_anything_runs(mcjax: Command, place: Path, overrides: list[str], words: list[str]) -> None:
    base = SIM if any(word.startswith("workload=") for word in overrides) else SMALL
    answer = mcjax(*base, *overrides)
    assert answer.status == 2, answer.err
    for word in words:
        assert word in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not runs(place), "nothing was run, so nothing is kept"


REFUSED_BY_WORLD = [
    (["backend=jax", "kvpool.dram_bytes=1e9"], ["kvpool.dram_bytes", "backend.pool_blocks"]),
    (["backend=jax", "kvpool.ssd_path=tier"], ["kvpool.ssd_path=tier", "give kvpool.ssd_bytes"]),
    (["backend=jax", "kvpool.ssd_bytes=1000000"], ["kvpool.ssd_bytes=1000000", "give kvpool.ssd_path"]),
    (["backend=jax", "kvpool.dram_encoding=int8"], ["kvpool.dram_encoding=int8", "workload.accepts_lossy=true"]),
    (
        ["backend=jax", "cluster=1m", "verify=true", "kvpool.dram_encoding=int8", "workload.accepts_lossy=true"],
        ["verify=True", "rounded blocks", "false"],
    ),
    (["backend=sim", "kvpool.ssd_encoding=fp8"], ["kvpool.ssd_encoding=fp8", "kvpool.ssd_bytes"]),
    (["backend=sim", "kvpool.huge_pages=never"], ["kvpool.huge_pages=never", "simulated memory", "auto"]),
    (["backend=sim", "kvpool.numa_node=0"], ["kvpool.numa_node=0", "simulated memory", "null"]),
    (["backend=sim", "kvpool.ssd_path=tier", "kvpool.ssd_bytes=1000"], ["kvpool.ssd_path=tier", "no bytes", "null"]),
    (["backend=jax", "backend.fused_steps=2"], ["backend.fused_steps=2", "numerics=invariant"]),
    (["backend=jax", "backend.prefill_widths=[32]"], ["backend.prefill_widths=[32]", "numerics=invariant"]),
    (["backend=jax", "backend.decode_batches=[0]"], ["backend.decode_batches=[0]", "each a whole number, 1 or more"]),
    (["backend=jax", "backend.mesh={prefil: 2}"], ["backend.mesh.prefil=2", "is no role"]),
    (["backend=jax", "workload=synthetic", "workload.vocab_size=1000"], ["workload.vocab_size=1000", "1 to 259"]),
    (["backend=jax", "sched/lengths=oracle"], ["sched.lengths=oracle", "backend=sim"]),
    (["backend=check", "verify=true"], ["verify=True", "backend=jax"]),
    (["backend=check", "backend.shape=2p"], ["backend.shape=2p", "needs prefill and decode"]),
    (["backend=check", "backend.schedules=0"], ["backend.schedules=0", "1 or more"]),
    (["backend=check", "workload=synthetic"], ["workload=mcjax.workload.synthetic.Synthetic", "has no use for it"]),
    (["backend=check", "workload.sessions=many"], ["workload.sessions=many", "a whole number"]),
    (["backend=check", "workload.sessions=3"], ["workload.sessions=3", "has no use for it"]),
    (["backend=check", "cluster=2p2d"], ["cluster=2p2d", "backend.shape fixes a cluster"]),
    (["backend=check", "engine.lease_s=3"], ["engine.lease_s=3", "has no use for it"]),
    (["backend=check", "slices=2"], ["slices=2", "has no use for it"]),
    (["backend=check", "faults=random", "faults.lost=2"], ["faults.lost=2", "between 0 and 1"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED_BY_WORLD, ids=lambda value: " ".join(value))
def test_refused_of_a_world(mcjax: Command, place: Path, overrides: list[str], words: list[str]) -> None:
    answer = mcjax(*overrides)
    assert answer.status == 2, answer.err
    for word in words:
        assert word in answer.err
    assert not runs(place), "nothing was run, so nothing is kept"


def test_sizes_of_a_measured_machine_are_its_own(needed: Path) -> None:
    config = ["backend=sim", "cost=measured", f"cost.path={needed / 'measured.json'}"]
    check(plain_of(compose([*config, "backend.noise=0.1"])))
    with pytest.raises(ConfigError, match=r"^backend\.max_batch=4: cost=measured brings the sizes"):
        check(plain_of(compose([*config, "backend.max_batch=4"])))


def test_a_check_takes_what_it_reads() -> None:
    words = ["seed=3", "backend.shape=2p2d", "faults=random", "sched/prefill=random", "kvpool.watermark.low=0.5"]
    check(plain_of(compose(["backend=check", *words, "track=none"])))
    config = plain_of(compose(["backend=check"]))
    assert all(key.split(".")[0] in config for key in UNREAD_BY_CHECK)


def test_a_check_has_no_use_for_a_workload(place: Path) -> None:
    class Mine:
        name, block_tokens = "mine", None

        def sessions(self) -> Iterator[Any]:
            return iter(())

        def inputs(self) -> dict[str, str]:
            return {}

    with pytest.raises(ConfigError, match=r"^workload=Mine: backend=check has no use for it"):
        package.run(["backend=check", "backend.schedules=1"], workload=Mine())
    assert not runs(place)


@given(
    value=st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none()),
    least=st.none() | st.integers(-5, 5),
    most=st.none() | st.integers(5, 9),
)
def test_a_value_is_refused_exactly_when_it_does_not_fit(value: Any, least: int | None, most: int | None) -> None:
    kind = Annotated[float, Bounds(least, most=most)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    within = number and (least is None or value >= least) and (most is None or value <= most)
    fine = within and abs(value) < float("inf")
    assert fits(value, kind) is fine
    if fine:
        check_value("a.key", value, kind)
    else:
        with pytest.raises(ConfigError, match=r"^a\.key="):
            check_value("a.key", value, kind)


def test_kinds_in_words() -> None:
    kinds = {f"engine.{name}": kind for name, kind in kinds_of(SECTIONS["engine"]).items()}
    assert described(kinds["engine.headroom_tokens"]) == "a whole number of tokens, 1 or more, or null"
    assert described(kinds["engine.detect_s"]) == "a number of seconds, 0 or more"
    assert described(kinds_of(JaxBackend)["memory_share"]) == "a number, more than 0 and at most 1"
    assert described(kinds_of(JaxBackend)["prefill_widths"]) == "auto or a list, each a whole number, 1 or more"
    assert described(kinds_of(Root)["verify"]) == "true or false, or null"
