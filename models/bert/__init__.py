"""BERT pre-training: pipeline layers made of Hugging Face modules, data from English prose, and the training script.

What is where:

=====================  ==================================================================================
module                 idea
=====================  ==================================================================================
``sizes``              a Hugging Face ``BertConfig`` from a size name or a JSON file
``layers``             BERT as ``2L + 1`` pipeline layers
``tied_layers``        with the decoder tied to the word embeddings, as ``2L + 4``
``pre_layer_norm``     with LayerNorm before every sub-layer
``architecture``       Hugging Face's ``BertForPreTraining`` in terms of these layers
``loss``               masked-LM plus next-sentence cross-entropy, and what validation measures
``prose``              sentences from docstrings and plain text
``corpus``             the documents: docstrings found at run time, or the user's own files
``cache``              files that one process builds and the others wait for
``vocabulary``         a WordPiece vocabulary file and its special tokens
``wordpiece``          a WordPiece vocabulary made from text, and the tokenised corpus
``text_corpus``        the tokenised corpus of a script that streams text, in the cache
``sample``             what a sample is, and what a source of samples offers
``samples``            sentence pairs with dynamic masking; random tokens
``shards``             HDF5 files of samples in NVIDIA's layout
``shard_samples``      samples out of such files, block by block
``batches``            micro-batches that every rank computes for itself
``prepare``            the command that makes shards
``raw_text``           documents out of raw text files, piece by piece
``corpus_parts``       a tokenised corpus of such pieces
``preparation``        shards out of a tokenised corpus, and a folder's manifest
``worker_pool``        work shared among processes
``training_data``      the pieces above put together for a training script
``shared_data``        data on the ranks that read them, numbers on the others
``sample_shape``       tokens and prediction slots of a sample
``arguments``          the command line of ``train.py``
``training_loop``      the updates, with validation and checkpoints in between
``validation``         losses and accuracies over held-out samples
``run_checkpoints``    when a run is saved, and going on from there
``epoch_clock``        how long epochs take
``report``             progress bar, log lines, metrics file, loss plot
``pretraining``        a run from the command line to the validation loss
``train``              the training script
=====================  ==================================================================================
"""
