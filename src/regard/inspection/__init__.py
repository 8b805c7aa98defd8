"""Looking inside models: `regard.watch`."""
