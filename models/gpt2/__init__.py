"""GPT-2 as a plain Hugging Face model: an example of a script that knows nothing of pipelines."""
