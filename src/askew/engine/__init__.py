"""Engines run a cohort's local training; the server around them runs one round."""
