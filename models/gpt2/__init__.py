"""GPT-2, a causal language model: pipeline layers made of Hugging Face's blocks, and a small training script.

==================  =================================================================
module              idea
==================  =================================================================
``sizes``           a Hugging Face ``GPT2Config`` from a size name or a JSON file
``layers``          GPT-2 as pipeline layers, the decoder tied or with its own weights
``architecture``    Hugging Face's ``GPT2LMHeadModel`` in terms of these layers
``loss``            cross-entropy of the next token
``text``            a byte-level tokenizer, and text as one array of tokens
``blocks``          micro-batches of consecutive tokens
``training``        a run from the command line to the validation loss
``train``           the training script
==================  =================================================================
"""
