"""The rules of an audit."""
