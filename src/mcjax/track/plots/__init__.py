"""Pictures of runs, as matplotlib figures."""
