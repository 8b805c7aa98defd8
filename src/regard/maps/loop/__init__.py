"""The usual statistics of softmax weights by one compiled loop over rows."""
