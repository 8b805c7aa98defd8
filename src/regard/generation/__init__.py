"""How text is written token by token: greedy and beam search, sampling, and filters of logits."""
