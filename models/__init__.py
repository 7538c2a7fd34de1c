"""Models that train with ds_vpipe, written as lists of pipeline layers."""

# A second import under another name would make a second copy of every class, and isinstance checks would fail.
if __name__ != "ds_vpipe.models":
    raise ImportError(
        f"import it as ds_vpipe.models, not as {__name__}: two names would make two copies of every class"
    )
