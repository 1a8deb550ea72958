"""The scripts that made the embedded model in `pipeline/assets/`: corpus, tokenizer, training, evaluation."""
