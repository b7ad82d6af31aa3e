"""How blocks lie in memory, and how those of one layout become those of another."""
