"""Whether a cached prefix is fetched from another node or computed again, one policy a file."""
