"""Ragged chunked prefill over paged KV, which writes the new keys and values on the way."""
