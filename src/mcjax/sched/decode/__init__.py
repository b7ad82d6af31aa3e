"""Which instance decodes a request, one policy a file."""
