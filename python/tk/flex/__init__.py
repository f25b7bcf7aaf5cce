"""Attention with functions of the user's own."""
