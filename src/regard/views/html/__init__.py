"""The self-contained page that opens in any browser."""
