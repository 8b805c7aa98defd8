"""Language models: trained, written with, scored."""
