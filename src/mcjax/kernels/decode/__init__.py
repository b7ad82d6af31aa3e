"""Paged decode of one or a few query tokens a sequence, with mergeable results."""
