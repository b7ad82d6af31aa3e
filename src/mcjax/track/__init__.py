"""What a run leaves behind: its recorder, tables, summary, plots and live display."""
