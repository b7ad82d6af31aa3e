"""The user's own code: what a strategy is made of, what it is called with, and how it is made again."""
