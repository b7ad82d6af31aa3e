"""Lists of runs: what each is, how it stands, which of them are meant, and how they are shown."""
