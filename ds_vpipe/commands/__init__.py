"""The commands of ``python -m ds_vpipe``, one module each: its arguments, and what it prints and writes."""
