"""`backend=hits`: traces replayed through the real pool alone, every eviction strategy at every capacity."""
