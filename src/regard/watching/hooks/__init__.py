"""The hooks that intercept attention calls of a running model."""
