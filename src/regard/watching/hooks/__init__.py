"""The hooks that intercept calls of attention while a model runs."""
