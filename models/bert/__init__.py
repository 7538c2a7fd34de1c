"""BERT pre-training: pipeline layers made of Hugging Face modules, data from English prose, and the training script.

Read ``layers`` first, then ``training``, which has a run from its command line to the validation loss. Every rank
computes its micro-batches for itself (``data``), from text, HDF5 shards or random tokens, all of which are ``samples``.
"""
