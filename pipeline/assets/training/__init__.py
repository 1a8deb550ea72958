"""How the embedded model was made: corpus, tokenizer, trainer and evaluation."""
