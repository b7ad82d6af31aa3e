"""From a config to a run, and what can be done with one: the only package that imports hydra and sees all worlds."""
