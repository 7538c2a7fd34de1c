"""RoBERTa as pipeline layers: the encoder of :mod:`ds_vpipe.models.bert`, other positions and another head.

==================  =================================================================
module              idea
==================  =================================================================
``layers``          what differs from BERT, with a decoder of its own and a tied one
``architecture``    Hugging Face's ``RobertaForMaskedLM`` in terms of these layers
==================  =================================================================
"""
