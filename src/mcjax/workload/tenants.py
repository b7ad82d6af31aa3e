"""Tenants of a generated workload: who sends how much, at what priority, under which system prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mcjax.errors import ConfigError
from mcjax.workload.streams import number, whole


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share` is a weight: a tenant sends `share / sum of shares` of the sessions."""

    name: str
    share: float = 1.0
    priority: int = 0
    system_prompt_tokens: int = 0


def parse_tenants(tenants: Mapping[str, Mapping[str, Any]]) -> tuple[Tenant, ...]:
    """Tenants in the order of the mapping. Raises `ConfigError` naming the key that cannot work."""
    allowed = [field.name for field in fields(Tenant) if field.name != "name"]
    parsed: list[Tenant] = []
    for name, settings in tenants.items():
        key = f"workload.tenants.{name}"
        for setting in settings:
            if setting not in allowed:
                raise ConfigError(f"{key}.{setting}", settings[setting], "unknown key", allowed)
        tenant = Tenant(str(name), **dict(settings))
        number(f"tenants.{name}.share", tenant.share, 0)
        if isinstance(tenant.priority, bool) or not isinstance(settings.get("priority", 0), int):
            raise ConfigError(f"{key}.priority", tenant.priority, "must be a whole number; higher goes first")
        whole(f"tenants.{name}.system_prompt_tokens", tenant.system_prompt_tokens, 0)
        parsed.append(tenant)
    if not any(tenant.share > 0 for tenant in parsed):
        raise ConfigError("workload.tenants", list(tenants), "needs at least one tenant with a share above 0")
    return tuple(parsed)


def draw_tenant(rng: np.random.Generator, tenants: tuple[Tenant, ...]) -> Tenant:
    """A tenant by chance, weighted by share; always one draw from `rng`."""
    point = rng.random() * sum(tenant.share for tenant in tenants)
    for tenant in tenants:
        point -= tenant.share
        if point < 0:
            return tenant
    return next(tenant for tenant in reversed(tenants) if tenant.share > 0)  # rounding let the point slip past the end


def deal_tenants(tenants: tuple[Tenant, ...], count: int) -> list[Tenant]:
    """`count` tenants in turn, each next one the furthest below its share: shares hold even over a few sessions."""
    total = sum(tenant.share for tenant in tenants)
    dealt = [0] * len(tenants)
    order: list[Tenant] = []
    for index in range(count):
        lacking = [tenant.share * (index + 1) / total - dealt[i] for i, tenant in enumerate(tenants)]
        chosen = max(range(len(tenants)), key=lacking.__getitem__)
        dealt[chosen] += 1
        order.append(tenants[chosen])
    return order
