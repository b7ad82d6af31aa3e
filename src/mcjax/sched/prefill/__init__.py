"""Which instance prefills a request, one policy a file."""
