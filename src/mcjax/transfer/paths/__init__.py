"""Which way a copy goes, what waits for it there, and how ways have done so far."""
