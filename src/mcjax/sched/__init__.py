"""The conductor: what it knows of the cluster, and what it decides for every request."""
