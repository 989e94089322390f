"""Cumulative MoE-layer time to fixed losses, on one device and over ranks."""
