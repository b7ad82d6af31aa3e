"""In which order waiting requests are served, one policy a file."""
