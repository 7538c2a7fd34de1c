"""BERT pre-training: pipeline layers made of Hugging Face modules, data from English prose, and the training script.

What is where:

=================  ==================================================================================
module             idea
=================  ==================================================================================
``sizes``          a Hugging Face ``BertConfig`` from a size name or a JSON file
``layers``         BERT as ``2L + 1`` pipeline layers
``architecture``   Hugging Face's ``BertForPreTraining`` in terms of these layers
``loss``           masked-LM plus next-sentence cross-entropy
``prose``          sentences from docstrings and plain text
``corpus``         the documents: docstrings found at run time, or the user's own files
``cache``          files that one process builds and the others wait for
``wordpiece``      a WordPiece vocabulary, and the tokenised corpus
``samples``        sentence pairs with dynamic masking; random tokens
``batches``        micro-batches that every rank computes for itself
``training_data``  the pieces above put together for a training script
``arguments``      the command line of ``train.py``
``deadline``       a time limit on which all ranks agree
``report``         progress bar, log lines, metrics file, loss plot
``train``          the training script
=================  ==================================================================================
"""
