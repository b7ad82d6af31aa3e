"""Trains the built-in models: `mcjax train-tiny`."""
