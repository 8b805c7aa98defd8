"""How a query and a key become a number."""
