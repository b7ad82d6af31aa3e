"""Attention over a paged KV cache, one implementation a file."""
