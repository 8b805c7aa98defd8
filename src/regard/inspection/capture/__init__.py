"""How a model's attention calls are observed: in which module they run, and from which tensors their maps are read."""
