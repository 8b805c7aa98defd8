"""The view in a notebook: the page's own script, with weights that the kernel sends on request."""
