"""Models that train with ds_vpipe: a BERT written as pipeline layers, and plain Hugging Face models.

=====================  ==========================================================================
module                 idea
=====================  ==========================================================================
``hugging_face``       weights of a plain model or of BERT's layers, each rank reading its own
``export``             a pipeline checkpoint as a folder that ``from_pretrained`` loads
``start``              start of a training script: command line, ranks, the record of the run
``bert``               pre-training by layers (``train``), fine-tuning a plain model (``finetune``)
``gpt2``               a plain GPT-2 in DeepSpeed's loop
=====================  ==========================================================================
"""

# A second import under another name would make a second copy of every class, and isinstance checks would fail.
if __name__ != "ds_vpipe.models":
    raise ImportError(
        f"import it as ds_vpipe.models, not as {__name__}: two names would make two copies of every class"
    )
