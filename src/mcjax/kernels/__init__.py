"""Compute written for the accelerator, with a plain reference beside each kernel."""
