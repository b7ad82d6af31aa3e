"""The roofline of one device, and where each kernel lies under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcjax.app.kernels.rows import Row
from mcjax.cost.hardware import Hardware


def roofline(rows: Sequence[Row], hardware: Hardware, title: str) -> Any:
    """A `matplotlib.figure.Figure`: FLOP/s against FLOPs a byte, log-log. Hollow: the limit; filled: measured.

    Kernels without arithmetic have no place on it and are left out.
    """
    from mcjax.track.plots.style import GREY, INK, LOOKS, PAGE_IN, new_figure, styled

    drawn = [row for row in rows if row.cost.flops]
    with styled():
        figure = new_figure(PAGE_IN * 0.7, 3.2)
        axes = figure.subplots()
        meet = hardware.peak_flops / hardware.hbm_bytes_per_s
        least = min([row.intensity for row in drawn] + [meet]) / 4
        most = max([row.intensity for row in drawn] + [meet]) * 4
        axes.plot([least, meet], [least * hardware.hbm_bytes_per_s, hardware.peak_flops], color=INK)
        axes.plot([meet, most], [hardware.peak_flops] * 2, color=INK)
        axes.annotate(
            f"{hardware.hbm_bytes_per_s / 1e9:,.4g} GB/s, {hardware.peak_flops / 1e12:,.4g} TFLOP/s",
            (meet, hardware.peak_flops),
            xytext=(0, 3),
            textcoords="offset points",
            color=GREY,
        )
        for row, look in zip(drawn, LOOKS, strict=False):
            place = row.cost.flops / row.limit.seconds
            label = f"{row.case.kernel}, {row.case.text()}"
            axes.plot([row.intensity], [place], look.marker, color=look.colour, fillstyle="none", label=label)
            for timing in row.timings:
                reached = row.cost.flops / timing.seconds
                axes.plot([row.intensity], [reached], look.marker, color=look.colour)
                axes.annotate(
                    timing.implementation, (row.intensity, reached), xytext=(4, -2), textcoords="offset points"
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOPs a byte")
        axes.set_ylabel("FLOP/s of one device")
        axes.set_title(title)
        axes.legend(loc="lower right")
    return figure
