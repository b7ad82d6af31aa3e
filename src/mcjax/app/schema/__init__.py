"""What a config may hold: kinds of values, the sections that no one class declares, and what excludes what."""
