"""Scattered pages to contiguous canonical blocks, and back."""
