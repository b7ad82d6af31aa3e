"""The checking world: byte-true blocks and seeded faults in virtual time."""
