"""BERT pre-training: pipeline layers made of Hugging Face modules, data from English prose, and the training script.

=====================  ==================================================================================
module                 idea
=====================  ==================================================================================
``layers``             BERT as ``2L + 1`` pipeline layers
``model``              configuration and layers, new or from a folder, as the command line asks
``samples``            samples of masked tokens or whole words; random tokens
``corpus``             English prose from the docstrings of installed packages
``text``               sentence pairs out of text, by ``datasets`` and ``tokenizers``
``shards``             HDF5 files of samples in NVIDIA's layout
``prepare``            the command that makes shards
``data``               micro-batches that every rank computes for itself, from any of these
``loss``               masked-LM plus next-sentence cross-entropy, and validation by it
``metrics``            progress bar, log lines, metrics file, loss plot
``arguments``          the command line of ``train.py``
``training``           a run from the command line to the validation loss
``train``              the training script
``example``            one micro-batch for the profiler
``finetune``           fine-tuning a plain classifier
=====================  ==================================================================================
"""
