"""The real world: JAX programs on devices, and transfers between their memories."""
