"""Measurements, never tests: they print ratios with their spread and the machine they were taken on."""
