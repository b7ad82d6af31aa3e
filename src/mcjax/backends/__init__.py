"""The worlds that a run can happen in; everything above them is the same in all."""
