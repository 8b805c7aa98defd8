"""Random search for faults, for as long as it is asked: `make fuzz`. CONTRIBUTING.md says how it is used."""
