"""Timelines of ranks, in one form for plans, simulations and recordings."""
