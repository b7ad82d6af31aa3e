"""A sweep, or any runs, as one self-contained HTML page."""
