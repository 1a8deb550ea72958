"""Text to tokens and back: tokenizer, sampler, streaming detokenizer."""
