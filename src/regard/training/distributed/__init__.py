"""Training on several processes: devices, ranks, sharing parameters, files of shares."""
