"""The simulated world: virtual time, costs from a model, links that share bandwidth."""
