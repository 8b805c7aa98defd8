"""Looking at a model by `regard view`: the inputs, a run of ours, and any folder that transformers loads."""
