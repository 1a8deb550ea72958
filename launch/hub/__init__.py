"""Models of the Hugging Face Hub: download, and its errors in one line each."""
