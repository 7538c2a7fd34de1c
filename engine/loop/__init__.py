"""Engine for scripts that loop over forward, ``backward()`` and ``step()``."""
