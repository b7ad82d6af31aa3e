"""Roles stay as configured."""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.sched.view import ClusterView
from mcjax.types import Role


@dataclass(frozen=True)
class Static:
    """An instance takes the role that the cluster's config gives it."""

    def assign(self, instance: str, proposed: Role, view: ClusterView) -> Role:
        return proposed
