"""How blocks rest in a tier: as computed, or quantised."""
