"""`mcjax pool`: SSD tiers looked at from outside, whether or not a run uses them."""
