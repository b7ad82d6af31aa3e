"""Which requests are refused on arrival, one policy a file."""
