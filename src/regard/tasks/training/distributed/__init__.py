"""Training on several processes: devices, precision, ranks."""
