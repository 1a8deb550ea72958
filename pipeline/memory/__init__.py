"""What an engine needs of this machine's memory, and how much it may have."""
