"""Models that train with ds_vpipe, written as lists of pipeline layers: ``bert``, ``roberta``, ``gpt2``.

What they share:

=================  ==============================================================================
module             idea
=================  ==============================================================================
``seeds``          a random seed for each layer
``attention``      which of Hugging Face's attention implementations
``architecture``   what has to be known of a Hugging Face model: its layers and their names
``weight_folder``  a folder of ``save_pretrained``: configuration, and tensors read one by one
``pretrained``     layers that read their own weights when they are built
``model``          a new model or a pretrained one, as a command line asks for it
``export``         a pipeline checkpoint as a folder that ``from_pretrained`` loads
=================  ==============================================================================
"""

# A second import under another name would make a second copy of every class, and isinstance checks would fail.
if __name__ != "ds_vpipe.models":
    raise ImportError(
        f"import it as ds_vpipe.models, not as {__name__}: two names would make two copies of every class"
    )
