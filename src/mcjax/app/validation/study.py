"""A validation from its settings to its folder: calibrations and runs in turn, each kept, none done twice."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcjax.app.compose import compose
from mcjax.app.validation.comparison import Regime, Row, figures, regimes, rows
from mcjax.app.validation.found import Found
from mcjax.app.validation.page import markdown
from mcjax.app.validation.plot import plot
from mcjax.app.validation.points import SATURATED, Settings, measure, play
from mcjax.app.validation.steps import Step, overheads_of, refitted, steps_of
from mcjax.cost.measured import Machine, Measured, Overheads, Sizes, write
from mcjax.errors import ConfigError
from mcjax.track.run import Run

PROBE_LOAD = "0.5"
"""Of the run that hand-offs are taken from; its seed is that of no other run."""
PROBE_SEED = 1000

Say = Callable[[str], None]


class Study:
    """The folder holds `settings.json`, `calibrations/`, `machines/`, `runs/`, and the results when all is there."""

    def __init__(self, settings: Settings, folder: Path, say: Say):
        """Raises `ConfigError` if the folder holds a validation of other settings."""
        self._settings = settings
        self._folder = folder.absolute()
        self._say = say
        self._capacity_per_s = 0.0
        self._sizes: Sizes | None = None
        self._load_averages: dict[str, float] = {}
        kept = self._folder / "settings.json"
        mine = json.loads(json.dumps(asdict(settings)))
        if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != mine:
            raise ConfigError("--output", folder, "holds a validation of other settings; take another folder")
        for name in ("calibrations", "machines", "runs"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")

    def run(self) -> tuple[list[Row], list[Regime]]:
        """Do whatever is not there yet, and write the results."""
        settings = self._settings
        loads = [SATURATED, *(f"{load:g}" for load in settings.loads)]
        schedule = [(repeat, load) for repeat in range(settings.repeats) for load in loads]
        before = self._calibration(0)
        self._capacity_per_s = self._capacity(self._real(0, SATURATED))
        self._say(f"capacity: {self._capacity_per_s:.2f} sessions a second")
        points: list[dict[str, Any]] = []
        pairs: list[tuple[Measured, list[Step]]] = []
        sides: dict[str, dict[str, list[Run]]] = {load: {} for load in loads}
        whole, probes = before, list[Run]()
        for number, (repeat, load) in enumerate(schedule, start=1):
            if load == SATURATED:
                probes.append(self._probe(repeat))
            self._say(f"[{number}/{len(schedule)}] repeat {repeat}, load {load}: real")
            real = self._real(repeat, load)
            after = self._calibration(number)
            cost = self._measured(f"{repeat}-{load}", before.merged(after), [probes[-1]])
            self._say(f"[{number}/{len(schedule)}] repeat {repeat}, load {load}: simulated")
            simulated = self._simulated(repeat, load, "simulated", cost)
            steps = steps_of(real)
            own = refitted(cost, steps, self._overheads(before.merged(after), [real]))
            own_costs = self._simulated(repeat, load, "own-costs", own)
            pairs.append((cost, steps))
            sets = {"real": real, "simulated": simulated, "own_costs": own_costs}
            for side, run in sets.items():
                sides[load].setdefault(side, []).append(run)
            point = {"load": load, "repeat": repeat, "load_average": self._load_averages[f"{repeat}-{load}"]}
            points.append({**point, **{name: figures(run) for name, run in sets.items()}})
            whole, before = whole.merged(after), after
        machine = self._machine(whole, self._overheads(whole, probes))
        write(machine, self._folder / "measured.json")
        return self._results(points, pairs, sides)

    def _results(
        self,
        points: list[dict[str, Any]],
        pairs: list[tuple[Measured, list[Step]]],
        sides: dict[str, dict[str, list[Run]]],
    ) -> tuple[list[Row], list[Regime]]:
        found, steps = rows(points), regimes(pairs)
        result: dict[str, Any] = {
            "settings": asdict(self._settings),
            "machine": f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}",
            "capacity_per_s": self._capacity_per_s,
            "load_averages": [point["load_average"] for point in points],
            "points": points,
            "figures": [{**asdict(row), "error": row.error, "within": row.within} for row in found],
            "steps": [asdict(regime) for regime in steps],
        }
        (self._folder / "validation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (self._folder / "validation.md").write_text(markdown(result, found, steps), encoding="utf-8")
        plot(found, sides).savefig(self._folder / "validation.png")
        return found, steps

    # The parts, each taken from the folder if it is there

    def _calibration(self, number: int) -> Found:
        file = self._folder / "calibrations" / f"{number:02}.json"
        if not file.exists():
            self._say(f"calibration {number}")
            overrides = self._settings.real(SATURATED, 1.0, 0, self._folder)
            found, sizes = measure(overrides, self._settings.effort, lambda what, share: None)
            whole = {"sizes": asdict(sizes), "found": found.as_json()}
            _write_whole(file, json.dumps(whole) + "\n")
        content = json.loads(file.read_text(encoding="utf-8"))
        self._sizes = Sizes(**content["sizes"])
        return Found.of_json(content["found"])

    def _real(self, repeat: int, load: str, seed: int | None = None) -> Run:
        name = f"{repeat}-{load}"
        folder = self._folder / "runs" / f"{name}-real"
        file = folder / "load_average"
        if not file.exists():
            folder.mkdir(exist_ok=True)
            file.write_text(f"{os.getloadavg()[0]:.2f}\n", encoding="utf-8")
        self._load_averages[name] = float(file.read_text(encoding="utf-8"))
        capacity_per_s = self._capacity_per_s or 1.0
        return play(self._settings.real(load, capacity_per_s, repeat if seed is None else seed, folder), folder)

    def _probe(self, repeat: int) -> Run:
        self._say(f"repeat {repeat}: hand-offs")
        folder = self._folder / "runs" / f"{repeat}-probe-real"
        return play(self._settings.real(PROBE_LOAD, self._capacity_per_s, PROBE_SEED + repeat, folder), folder)

    def _simulated(self, repeat: int, load: str, what: str, cost: Measured) -> Run:
        """What was simulated of another machine, or by another version of this, is not taken from the folder."""
        machine = self._folder / "machines" / f"{repeat}-{load}-{what}.json"
        before = machine.read_text(encoding="utf-8") if machine.exists() else ""
        write(cost.machine, machine)
        folder = self._folder / "runs" / f"{repeat}-{load}-{what}"
        same = machine.read_text(encoding="utf-8") == before
        overrides = self._settings.simulated(load, self._capacity_per_s or 1.0, repeat, machine, folder)
        return play(overrides, folder, anew=not same)

    def _capacity(self, saturated: Run) -> float:
        """Sessions that are served in a second when all come at once."""
        return self._settings.sessions / float(saturated.summary["duration_s"])

    def _measured(self, name: str, found: Found, probes: list[Run]) -> Measured:
        return Measured(self._machine(found, self._overheads(found, probes)), f"measured {name}")

    def _overheads(self, found: Found, runs: list[Run]) -> Overheads:
        assert self._sizes is not None  # a calibration has said so
        return overheads_of(runs, found.copies(), self._sizes.page_tokens)

    def _machine(self, found: Found, overheads: Overheads) -> Machine:
        assert self._sizes is not None
        config = compose(self._settings.real(SATURATED, 1.0, 0, self._folder))
        return Machine(
            hardware=config.hardware.name,
            model=config.model.name,
            sizes=self._sizes,
            steps=found.measurements(),
            slowdown=found.slowdown(),
            copies=found.copies(),
            overheads=overheads,
            spread=found.spread(),
            notes={"by": "mcjax validate", "overrides": list(self._settings.overrides)},
        )


def _write_whole(file: Path, text: str) -> None:
    """All of it or nothing, so that an interrupt leaves no half a file."""
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
