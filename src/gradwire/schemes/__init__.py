"""Schemes: one published system each."""
