"""The supervisor and what it needs: child processes started, watched, replaced and ended."""
