"""A run as a trace for Perfetto: what each instance, link and tier did, and one request's way through them."""
