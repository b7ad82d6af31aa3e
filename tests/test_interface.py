"""What `docs/stability.md` promises is still there: a name, column, key or method goes only on purpose.

`interface.json` lists it. `python tests/test_interface.py` writes the list anew, from the code: for what is added, and
for what has been announced as that page says and now goes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import mcjax
from mcjax.app.compose import compose, plain_of
from mcjax.app.plugins import PLACES, methods
from mcjax.track.flat import flat
from mcjax.track.metrics import CATALOGUE
from mcjax.track.record import RunRecord
from mcjax.track.run import Run
from mcjax.track.schemas import SCHEMA_VERSION, SCHEMAS
from mcjax.track.sinks.base import Sink

LIST = Path(__file__).parent / "interface.json"
CONF = Path(mcjax.__file__).parent / "conf"
ADDED_FREELY = ("python", "run", "record", "config", "options", "figures")
"""Parts to which something may be added at any time; it counts as promised from the day it is listed."""


def interface() -> dict[str, dict[str, Any]]:
    """The interface as it is: by part, what there is and its form."""
    protocols = {place: protocol for place, (_, protocol) in PLACES.items()} | {"track.sinks": Sink}
    return {
        "python": {name: _parameters(getattr(mcjax, name)) for name in mcjax.__all__},
        "run": {name: "" for name in vars(Run) if not name.startswith("_")},
        "record": dict.fromkeys(RunRecord.__dataclass_fields__, ""),
        "tables": {f"{table}.{column}": kind for table, columns in SCHEMAS.items() for column, kind in columns},
        "protocols": {
            f"{place}.{method}": _parameters(getattr(protocol, method))
            for place, protocol in protocols.items()
            for method in methods(protocol)
        },
        "config": {key: "" for key in flat(plain_of(compose([]))) if "._" not in key},
        "options": {
            f"{path.parent.relative_to(CONF)}={path.stem}": ""
            for path in sorted(CONF.rglob("*.yaml"))
            if path.parent != CONF and not path.parent.is_relative_to(CONF / "hydra")
        },
        "figures": dict.fromkeys(CATALOGUE, ""),
    }


def _parameters(what: Any) -> str:
    """`overrides, progress, **strategies`; "" for what is no function."""
    if not inspect.isroutine(what):
        return ""
    kinds = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    found = inspect.signature(what).parameters.values()
    return ", ".join(kinds.get(each.kind, "") + each.name for each in found if each.name != "self")


def _kept(listed: str, now: str, may_grow: bool) -> bool:
    """Whether whoever relies on a form that is listed is still served by what there is."""
    return now == listed or (may_grow and set(listed.split(", ")) <= set(now.split(", ")))


@pytest.fixture(scope="module")
def listed() -> Mapping[str, Mapping[str, str]]:
    return json.loads(LIST.read_text())["parts"]


@pytest.mark.parametrize("part", interface())
def test_what_is_promised_is_there(listed: Mapping[str, Mapping[str, str]], part: str) -> None:
    now = interface()[part]
    gone = {
        name: form
        for name, form in listed[part].items()
        if name not in now or not _kept(form, now[name], part in ADDED_FREELY)
    }
    assert not gone, f"{part}: gone or changed; if that was announced (docs/stability.md), write interface.json anew"
    if part not in ADDED_FREELY:
        assert set(now) == set(listed[part]), f"{part}: new; raise its version and write interface.json anew"


def test_columns_go_with_their_version() -> None:
    assert json.loads(LIST.read_text())["schema"] == SCHEMA_VERSION


def test_the_citation_is_of_this_version() -> None:
    """Has what the Citation File Format 1.2.0 requires, and nothing that it does not know."""
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    known = "abstract authors cff-version keywords license message references title type version".split()
    assert set(citation) <= set(known)
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == mcjax.__version__
    assert citation["type"] == "software"
    for reference in citation["references"]:
        assert {"authors", "title", "type"} <= reference.keys()
        assert all({"family-names", "given-names"} <= author.keys() for author in reference["authors"])


def test_names_lead_somewhere() -> None:
    assert all(getattr(mcjax, name) is not None for name in mcjax.__all__)


if __name__ == "__main__":
    LIST.write_text(json.dumps({"schema": SCHEMA_VERSION, "parts": interface()}, indent=1, sort_keys=True) + "\n")
