"""The KV cache pool: which blocks exist on which node, their keys, who holds them and what goes first."""
