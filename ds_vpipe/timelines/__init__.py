"""What every rank did or will do and when, in one form for plans, simulations and recordings."""
