"""Language models on a paged KV cache, their weights and tokenizers."""
