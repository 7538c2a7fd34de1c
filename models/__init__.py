"""Models that train with ds_vpipe: a BERT written as pipeline layers, and plain Hugging Face models.

``hugging_face`` reads weights and ``export`` writes them, ``start`` begins a training script. ``bert`` pre-trains by
layers and fine-tunes a plain model, ``gpt2`` is a plain model in DeepSpeed's loop.
"""

# A second import under another name would make a second copy of every class, and isinstance checks would fail.
if __name__ != "ds_vpipe.models":
    raise ImportError(
        f"import it as ds_vpipe.models, not as {__name__}: two names would make two copies of every class"
    )
