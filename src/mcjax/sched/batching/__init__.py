"""What goes into the next step of an instance, one policy a file."""
