"""Which cached block goes first when a node is full, one policy a file."""
