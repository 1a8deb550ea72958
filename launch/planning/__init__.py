"""What a start will use: GPU or CPU, and the memory plan."""
