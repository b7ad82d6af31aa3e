"""Moving cache blocks between memories."""
