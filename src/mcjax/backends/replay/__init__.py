"""The world whose mechanisms answer from a run's own log."""
