"""Where a run is reported to, beside its own directory."""
