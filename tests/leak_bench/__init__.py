"""A bench of leaks: mechanisms of many kinds, planted behind the mixer of a layer of many architectures."""
