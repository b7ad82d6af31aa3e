"""The real engine with each instance in a process of its own (`launcher=processes`)."""
