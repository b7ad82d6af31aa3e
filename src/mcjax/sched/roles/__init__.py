"""Which role a joining instance takes, one policy a file."""
