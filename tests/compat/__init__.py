"""`make compat`: the tests on other versions of Python, torch and transformers, each in an environment of its own."""
