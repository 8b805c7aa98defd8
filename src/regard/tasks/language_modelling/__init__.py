"""Language models: how they are trained and used."""
