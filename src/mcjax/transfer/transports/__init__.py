"""Ways that bytes move between memories of this machine."""
