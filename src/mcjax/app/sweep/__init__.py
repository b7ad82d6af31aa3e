"""Sweeps: many points of one study, played in processes of their own."""
