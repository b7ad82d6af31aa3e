"""When blocks go from a tier to the one below, one policy a file."""
