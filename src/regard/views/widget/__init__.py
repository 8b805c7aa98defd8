"""The view in a notebook: the page's own script, with weights that the kernel sends when they are asked for."""
