"""The SSD tier: slots in preallocated files, each with a header in front of its bytes, that outlive their process."""
