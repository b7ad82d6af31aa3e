"""Picks a cost model that fits the run's hardware and model."""

from __future__ import annotations

from mcjax.cost import catalogue
from mcjax.cost.base import CostModel
from mcjax.cost.hardware import Hardware
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.roofline import Roofline


def automatic(model: ModelShape, hardware: Hardware) -> CostModel:
    """The shipped fit if it was made on just this pair, else the roofline with its default efficiencies."""
    fitted = catalogue.fitted()
    if (fitted.fitted_hardware, fitted.fitted_model) == (hardware.name, model.name):
        return fitted
    return Roofline(model, hardware)
