"""What `regard.on_attention` opens: the function is called, and caches and layers are cut to what it keeps."""
