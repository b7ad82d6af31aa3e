"""The tracks of a trace, made when something is first written on them."""

from __future__ import annotations

from collections.abc import Iterable

from mcjax.track.perfetto.lanes import Lanes
from mcjax.track.perfetto.packets import Arguments, PacketWriter

Path = tuple[str, ...]
"""A track's name below those of its parents, such as `("instances", "p0 (prefill)", "prefill chunks")`."""


class Tracks:
    """Writes on tracks that are named by their paths; all stand below one named `root`; names in `order` stand in this
    order wherever they come, and before others.

    Perfetto sorts topmost tracks by name, others as they were made.
    """

    def __init__(self, writer: PacketWriter, root: str, order: Iterable[str] = ()):
        self._writer = writer
        self._made: dict[Path, int] = {}
        self._children: dict[Path, int] = {}
        self._root = writer.track(root)
        self._lanes: dict[Path, Lanes] = {}
        self._shown: dict[Path, float] = {}
        self._ranks = {name: rank for rank, name in enumerate(order, 1)}

    def span(
        self,
        path: Path,
        name: str,
        start_ns: int,
        end_ns: int,
        category: str,
        arguments: Arguments,
        flows: Iterable[int] = (),
        within: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """A slice on one of the path's lanes; call in order of ends. `within` it: name, begin and end of its parts."""
        lanes = self._lanes.get(path)
        if lanes is None:
            lanes = self._lanes[path] = Lanes(lambda: self._new(path))
        lane = lanes.take(start_ns, end_ns)
        self._writer.begin(lane, name, start_ns, category, arguments, flows)
        for part, part_start_ns, part_end_ns in within:
            self._writer.begin(lane, part, part_start_ns, f"{category}.{part}", {})
            self._writer.end(lane, part_end_ns)
        self._writer.end(lane, end_ns)

    def group(self, path: Path) -> None:
        """Make a track now, so that it stands before those that come later."""
        self._track(path)

    def instant(
        self, path: Path, name: str, time_ns: int, category: str, arguments: Arguments, flows: Iterable[int] = ()
    ) -> None:
        self._writer.instant(self._track(path), name, time_ns, category, arguments, flows)

    def value(self, path: Path, time_ns: int, value: float) -> None:
        """A counter's value, left out where it shows that already."""
        if self._shown.get(path) != value:
            self._shown[path] = value
            self._writer.value(self._track(path, counter=True), time_ns, value)

    def _track(self, path: Path, counter: bool = False) -> int:
        found = self._made.get(path)
        if found is None:
            found = self._made[path] = self._new(path, counter)
        return found

    def _new(self, path: Path, counter: bool = False) -> int:
        above, name = path[:-1], path[-1]
        parent = self._track(above) if above else self._root
        self._children[above] = rank = self._children.get(above, len(self._ranks)) + 1
        unit = ("bytes" if name.endswith("bytes") else "") if counter else None
        return self._writer.track(name, parent, self._ranks.get(name, rank), unit)
