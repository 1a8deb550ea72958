"""Start Tandem from a checkout: `python launch.py`, or `python launch.py generate --prompt ...`."""

from launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
