"""Runs against one another: groups of them with intervals (`comparison`), two of them in every detail (`diff`)."""
