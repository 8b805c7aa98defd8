"""How attention calls of a model are seen: whose calls, with what mask, under which module."""
