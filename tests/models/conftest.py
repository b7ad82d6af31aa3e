"""Eight CPU devices, before anything here computes; importing JAX fixes neither."""

from __future__ import annotations

import jax

if jax.config.jax_num_cpu_devices < 8:  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_num_cpu_devices", 8)
