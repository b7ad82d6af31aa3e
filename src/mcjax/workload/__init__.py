"""Where requests come from: traces, generated sessions and chat."""
