"""From text to tokens and back: tokenizer, sampler, streaming detokenizer."""
