"""Checks of machines before training: a probe that runs anywhere, facts from every host, findings with remedies."""
