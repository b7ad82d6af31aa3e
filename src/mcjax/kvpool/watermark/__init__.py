"""How full a node may get before blocks are evicted, one policy a file."""
