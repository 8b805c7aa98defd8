"""Translators: trained, used, evaluated."""
