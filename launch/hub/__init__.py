"""Models of the Hugging Face Hub: the download, and its errors in one line each."""
