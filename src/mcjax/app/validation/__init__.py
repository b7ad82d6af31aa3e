"""`mcjax validate`: calibration of this machine, the same runs in both worlds, and what lies between them."""
