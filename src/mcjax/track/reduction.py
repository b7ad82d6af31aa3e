"""What `track.level=requests` keeps of a `full` table."""

from __future__ import annotations

from mcjax.track.arrow import Table, arrow
from mcjax.track.schemas import QUANTITIES, type_of
from mcjax.track.steps import STEP_KINDS
from mcjax.track.tables import chosen


def reduced(name: str, piece: Table) -> Table:
    """Of a piece of a `full` table, the rows and cells that `requests` keeps."""
    if name in ("reports", "outcomes"):
        return piece.slice(0, 0)
    if name == "events":
        return piece.filter(arrow().array(chosen(piece, "kind", STEP_KINDS)))
    if name == "decisions":
        rows, pa = piece.num_rows, arrow()
        cells = {"names": pa.array([[]] * rows, type_of("text[]")), "others": pa.array([""] * rows, pa.string())}
        cells |= {quantity: pa.nulls(rows, type_of("float[]")) for quantity in QUANTITIES}
        for column, array in cells.items():
            piece = piece.set_column(piece.schema.get_field_index(column), column, array)
    return piece
