"""`regard.on_attention`: a function that is called after each attention call, and may say what stays."""
