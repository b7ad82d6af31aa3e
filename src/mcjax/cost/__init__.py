"""What work costs: model shapes, hardware, and how long steps and transfers take."""
